// Vercel's AI SDK with the provider of Anthropic's API: generateText and streamText with tools.

import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const results = JSON.parse(process.env.RESULTS);
const provider = createAnthropic({ baseURL: `${process.env.GATEWAY_URL}/v1`, apiKey: "none" });

function request(question, calls) {
  const described = (name, description, argument) =>
    tool({
      description,
      inputSchema: z.object({ [argument]: z.string() }),
      execute: async (given) => {
        calls.push([name, given]);
        return results[name][given[argument]];
      },
    });
  return {
    model: provider(process.env.MODEL),
    prompt: question,
    tools: {
      track_order: described("track_order", "Find out where an order is.", "order"),
      send_invoice: described("send_invoice", "Send the invoice of an order.", "order"),
    },
    stopWhen: stepCountIs(4),
    temperature: 0,
    maxRetries: 0,
  };
}

const answers = [];
for (const question of process.argv.slice(2)) {
  const calls = [];
  const { text } = await generateText(request(question, calls));
  const streamedCalls = [];
  const streamed = await streamText(request(question, streamedCalls)).text;
  if (JSON.stringify([calls, text]) !== JSON.stringify([streamedCalls, streamed]))
    throw new Error(`streamed: ${JSON.stringify([streamedCalls, streamed])}`);
  answers.push({ calls, answer: text });
}
console.log(JSON.stringify(answers));

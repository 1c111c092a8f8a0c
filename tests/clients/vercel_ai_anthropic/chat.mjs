// Vercel's AI SDK with the provider of Anthropic's API.

import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText, streamText } from "ai";

const provider = createAnthropic({ baseURL: `${process.env.GATEWAY_URL}/v1`, apiKey: "none" });
const ask = { model: provider(process.env.MODEL), prompt: process.argv[2], temperature: 0, maxRetries: 0 };
const plain = await generateText(ask);
const streamed = [];
for await (const text of streamText(ask).textStream) streamed.push(text);
console.log(JSON.stringify({ plain: plain.text, streamed }));

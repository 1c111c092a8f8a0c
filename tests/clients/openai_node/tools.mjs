// openai, the SDK for JavaScript: its loop that calls tools.

import OpenAI from "openai";

const results = JSON.parse(process.env.RESULTS);
const client = new OpenAI();

async function answer(question) {
  const calls = [];
  const described = (name, description, argument) => ({
    type: "function",
    function: {
      name,
      description,
      parse: JSON.parse,
      parameters: { type: "object", properties: { [argument]: { type: "string" } }, required: [argument] },
      function: (given) => {
        calls.push([name, given]);
        return results[name][given[argument]];
      },
    },
  });
  const runner = client.chat.completions.runTools({
    model: process.env.MODEL,
    messages: [{ role: "user", content: question }],
    tools: [
      described("track_order", "Find out where an order is.", "order"),
      described("send_invoice", "Send the invoice of an order.", "order"),
    ],
    temperature: 0,
    stream: true,
  });
  return { calls, answer: await runner.finalContent() };
}

const answers = [];
for (const question of process.argv.slice(2)) answers.push(await answer(question));
console.log(JSON.stringify(answers));

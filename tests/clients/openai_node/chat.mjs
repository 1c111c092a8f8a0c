// openai, the SDK for JavaScript.

import OpenAI from "openai";

const client = new OpenAI();
const ask = {
  model: process.env.MODEL,
  messages: [{ role: "user", content: process.argv[2] }],
  temperature: 0,
};
const plain = await client.chat.completions.create(ask);
const streamed = [];
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
  const text = chunk.choices[0]?.delta.content;
  if (text) streamed.push(text);
}
console.log(JSON.stringify({ plain: plain.choices[0].message.content, streamed }));

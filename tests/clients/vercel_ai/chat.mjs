// Vercel's AI SDK.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const provider = createOpenAICompatible({ name: "pipeline", baseURL: process.env.OPENAI_BASE_URL });
const ask = { model: provider(process.env.MODEL), prompt: process.argv[2], temperature: 0, maxRetries: 0 };
const plain = await generateText(ask);
const streamed = [];
for await (const text of streamText(ask).textStream) streamed.push(text);
console.log(JSON.stringify({ plain: plain.text, streamed }));

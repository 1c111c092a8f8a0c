// Vercel's AI SDK with its provider for OpenAI, which asks the Responses API: generateText and streamText.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const provider = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
const request = { model: provider(process.env.MODEL), prompt: process.argv[2], temperature: 0, maxRetries: 0 };
const plain = await generateText(request);
const streamed = [];
for await (const text of streamText(request).textStream) if (text) streamed.push(text);
console.log(JSON.stringify({ plain: plain.text, streamed }));

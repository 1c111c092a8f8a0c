// The SDK of Claude Code: one turn, with its defaults.

import { query } from "@anthropic-ai/claude-agent-sdk";

let ended;
for await (const message of query({ prompt: process.argv[2], options: { model: process.env.MODEL } })) {
  if (message.type === "result") ended = message;
}
console.log(JSON.stringify({ text: ended.result, error: ended.is_error, turns: ended.num_turns }));

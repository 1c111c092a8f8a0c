"""An OpenAI-compatible HTTP server with server-sent events, in front of client and response cache."""

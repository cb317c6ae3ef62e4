"""The prefix cache under prompts that share beginnings and code: cold, warm, through Redis, and with Redis gone."""

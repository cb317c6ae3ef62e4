"""LlamaIndex's OpenAILike: a stream; prints the parts as JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage  # type: ignore[import-not-found]
from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-not-found]

llm = OpenAILike(
    model="code",
    api_base=sys.argv[1],
    api_key="none",
    is_chat_model=True,
    max_tokens=60,
    temperature=0.8,
    additional_kwargs={"seed": 5},
)
asked = [ChatMessage(role="user", content="count the lines of a file")]
sys.stdout.write(json.dumps({"texts": [part.delta for part in llm.stream_chat(asked)]}))

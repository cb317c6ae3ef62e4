"""LangChain's ChatOpenAI: a stream, and a stream of a structured output; prints the parts as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

SCHEMA = {
    "title": "file",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "lines": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "lines"],
    "additionalProperties": False,
}

common = {"base_url": sys.argv[1], "api_key": "none", "model": "code"}
llm = ChatOpenAI(**common, temperature=0.8, seed=5, max_tokens=60)
# Enough for all white space that a grammar allows.
structured = ChatOpenAI(**common, temperature=0.7, seed=6, max_tokens=700)
asked = "count the lines of a file"
texts = [part.content for part in llm.stream(asked)]
parts = list(structured.with_structured_output(SCHEMA, method="json_schema").stream(asked))
sys.stdout.write(json.dumps({"texts": texts, "parts": parts}))

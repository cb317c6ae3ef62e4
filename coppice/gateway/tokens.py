"""The endpoints that turn text into tokens and back, as vLLM has them."""

from __future__ import annotations

from coppice.gateway.choices import token_text
from coppice.gateway.endpoint import Endpoint, caller_metadata
from coppice.gateway.errors import broken_answer
from coppice.gateway.exchange import HttpExchange
from coppice.gateway.fields import DetokenizeFields, TokenizeFields
from coppice.gateway.translation import conversation
from coppice.v1 import inference_pb2


class Tokenize(Endpoint):
    """/tokenize."""

    kind = TokenizeFields

    async def respond(self, exchange: HttpExchange, fields: TokenizeFields, identity: str) -> None:
        """Answer with the tokens, their number and the length of the context."""
        metadata = caller_metadata(exchange.headers)
        model = await self._upstream.model_named(fields.model, metadata)
        request = inference_pb2.TokenizeRequest(token_bytes=bool(fields.return_token_strs))
        if fields.messages is not None:
            request.messages.CopyFrom(conversation(fields.messages, fields.tools or ()))
        else:
            request.prompt = fields.prompt or ""
            if fields.add_special_tokens is not None:
                request.special_tokens = fields.add_special_tokens
        answer = await self._upstream.tokenize(request, metadata, self.timeout_s(exchange), exchange.client)
        if fields.return_token_strs and len(answer.tokens) != len(answer.token_ids):
            raise broken_answer("as many texts as tokens are needed")
        content = {
            "count": len(answer.token_ids),
            "max_model_len": model.info.max_context_tokens,
            "tokens": list(answer.token_ids),
            "token_strs": [token_text(token) for token in answer.tokens] if fields.return_token_strs else None,
        }
        await exchange.answer(200, content)


class Detokenize(Endpoint):
    """/detokenize."""

    kind = DetokenizeFields

    async def respond(self, exchange: HttpExchange, fields: DetokenizeFields, identity: str) -> None:
        """Answer with the text."""
        metadata = caller_metadata(exchange.headers)
        await self._upstream.model_named(fields.model, metadata)
        request = inference_pb2.DetokenizeRequest(token_ids=fields.tokens)
        answer = await self._upstream.detokenize(request, metadata, self.timeout_s(exchange), exchange.client)
        await exchange.answer(200, {"prompt": answer.text})

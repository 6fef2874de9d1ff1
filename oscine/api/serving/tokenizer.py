"""The tokenizer of a served model: a text on which it fails is the error of one request."""

import logging
from collections.abc import Callable

from tokenizers import Encoding

from oscine.api.common.errors import APIError
from oscine.chat.tokenizer import EncodingError, Tokenizer

logger = logging.getLogger(__name__)


class ServedTokenizer(Tokenizer):
    def _encoded(self, encode: Callable[..., list[Encoding]], text: str) -> Encoding:
        """Raises APIError, with one line in the log, where the tokenizer fails."""
        try:
            return super()._encoded(encode, text)
        except EncodingError as error:
            logger.error("%s", error)
            raise APIError("The model's tokenizer fails on a text of this request.") from None

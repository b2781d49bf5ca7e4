"""Marks of tool calls, which become text in one form for requests with tools.

Most are special tokens, which the text of an answer would omit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from deployments.messages import CALL_ARGUMENTS, CALL_CLOSE, CALL_ID, CALL_OPEN, CALL_STRING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What DeepSeek's marks have in place of bars and blanks.
_DEEPSEEK = str.maketrans({"|": "\uff5c", " ": "\u2581"})
# Text by the name of a token.
_TEXTS: Mapping[str, str] = {
    **{mark: mark for mark in (CALL_OPEN, CALL_CLOSE, CALL_ID, CALL_ARGUMENTS, CALL_STRING)},
    "<|tool_call_start|>": CALL_OPEN,  # of LFM2
    "<|tool_call_end|>": CALL_CLOSE,
    "<|tool_call|>": CALL_OPEN,  # of Granite 3
    "<|tool_call>": CALL_OPEN,  # of Gemma 4
    "<tool_call|>": CALL_CLOSE,
    "<|START_ACTION|>": CALL_OPEN,  # of Command
    "<|END_ACTION|>": CALL_CLOSE,
    "<TOOLCALL>": CALL_OPEN,  # of Nemotron
    "</TOOLCALL>": CALL_CLOSE,
    **{
        name.translate(_DEEPSEEK): text
        for name, text in {
            "<|tool calls begin|>": "",  # of DeepSeek V3.1, around all calls
            "<|tool calls end|>": "",
            "<|tool call begin|>": CALL_OPEN,
            "<|tool sep|>": CALL_ARGUMENTS,
            "<|tool call end|>": CALL_CLOSE,
        }.items()
    },
    "[TOOL_CALLS]": CALL_OPEN,  # of Mistral, which marks no end
}


def find_call_marks(tokenizer: Tokenizer, special_tokens: Collection[int]) -> dict[int, str]:
    """Return the texts of marks that are special tokens or have another name, by id."""
    return {
        token: text
        for name, text in _TEXTS.items()
        if (token := tokenizer.token_to_id(name)) is not None
        and (token in special_tokens or text != name)
    }

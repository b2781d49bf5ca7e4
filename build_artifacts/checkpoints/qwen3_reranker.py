"""The text of the Qwen3 rerankers, for those whose chat template does not render it.

Source: their model cards, such as https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
"""

from __future__ import annotations

from deployments.artifacts.pair_template import PairTemplate

QWEN3_RERANKER = PairTemplate(
    start="<|im_start|>system\nJudge whether the Document meets the requirements based on the "
    'Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: ",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
    before_first="\n<Query>: ",
    before_second="\n<Document>: ",
    end="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)

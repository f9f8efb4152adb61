"""A sample of text, from which it is seen what a model's layers usually compute."""

from __future__ import annotations

from fused_kv_llm.model.context_length import context_length
from fused_kv_llm.model.loading import LoadedModel

__all__ = ["sample_ids"]

_SAMPLE = """On 14 March 2019 the harbour board met to discuss the new ferry. "We have 3 bids," said its chair, who had
held the office since 1998, "and the lowest is 42.5 million euros." The river, which is 310 km long, rises in the north
and reaches the sea near the old mill. Its first bridge was built in 1887; the second one was never finished.

Step 1: open the valve slowly. Step 2: read the pressure (p = F / A) and compare it with table 7. If it is above
2.4 bar, call the operator; otherwise go on. See also: maintenance, safety rules, error codes E10 to E27.

The album was released in the United States by a small label. Critics praised its second half, and it won two awards."""
_SAMPLE_TOKENS = 256


def sample_ids(loaded: LoadedModel) -> list[int]:
    """Return the sample's ids that the model knows, as many as it takes, 256 at most."""
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    ids = [one for one in loaded.tokenizer(_SAMPLE)["input_ids"] if 0 <= one < vocabulary]
    return ids[: min(_SAMPLE_TOKENS, context_length(loaded.model.config.get_text_config(), loaded.model_id))]

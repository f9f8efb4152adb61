"""What an engine says about chunks: whether they are reused, and if not, why."""

from __future__ import annotations

from collections.abc import Sequence

from fused_kv_llm.prompt import Prompt
from fused_kv_llm.report import FusionReport, Verdict

from .state import EngineState

__all__ = ["ExplainMethods"]


class ExplainMethods(EngineState):
    """The methods of an engine that explain."""

    def explain(
        self,
        prompt: Prompt,
        expected: Sequence[str] = (),
        *,
        recompute_ratio: float | None = None,
        operator: bool = False,
    ) -> list[Verdict]:
        """Say which chunks a prompt would reuse, and of those that are expected in it why the others are not.

        Nothing is computed, and what earlier requests have left is not considered. The chunks' files are opened, so
        that one that is damaged is found out, and put away as by a request.

        Parameters
        ----------
        prompt : str, list of messages, ChatPrompt or RawPrompt
        expected : sequence of str
            Texts of chunks, for instance those that a search has returned; at most 256 are looked at.
        recompute_ratio : float or None
            Overrides the engine's.
        operator : bool
            Whether to say also that another tenant has stored a chunk. Leave it off for whatever a tenant gets to
            see: the answer tells that some tenant knows the text.

        Returns
        -------
        list of Verdict
            One for each expected chunk, in their order, then those of other chunks in the prompt.

        Raises
        ------
        PromptError, PromptTooLongError
            If the prompt is empty or does not fit.
        CorpusError
            If one string was given instead of several, or a chunk is not text.
        """
        report = FusionReport(recompute_ratio=self._recipe(recompute_ratio, None, 0).ratio)
        with self.requests.planner.plan(prompt, report, counted=False) as request:
            self.requests.judge_expected(expected, request.judged, report, operator=operator)
        return report.verdicts

    def explain_text(self, text: str, *, operator: bool = False) -> Verdict:
        """Say whether a chunk would be reused in a prompt that contains it, and if not, why.

        Parameters
        ----------
        text : str
            The chunk. It may be long or odd: the time that is spent on it is bounded.
        operator : bool
            See :meth:`explain`.

        Returns
        -------
        Verdict
            ``reusable`` if it would be.

        Raises
        ------
        CorpusError
            If it is not text.

        Examples
        --------
        >>> import tempfile
        >>> from fused_kv_llm import FusedKVEngine
        >>> engine = FusedKVEngine("smollm2-135m", kv_dir=tempfile.mkdtemp())
        >>> engine.explain_text("A sentence that nobody has ingested so far.").outcome.value
        'not_ingested'
        """
        return self.requests.judge.judge([text], operator=operator)[0]

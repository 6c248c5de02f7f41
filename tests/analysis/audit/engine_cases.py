"""Engines that are not vLLM: what is unknown of them, and no flag of vLLM's to change it."""

from dataclasses import replace

from agent.catalog import engine_facts as fact
from agent.records.audit import LatencyLimits
from tests.analysis.audit.cases import UNKNOWN, WARN, AuditCase
from tests.analysis.audit.evidence import engine, evidence, sample, with_engine

_SGLANG = replace(sample(), dialect="sglang")
_WITHOUT_OUTPUT = replace(sample({(fact.OUTPUT_TOKENS, ()): None}), dialect="sglang")

ENGINE_CASES = (
    AuditCase(
        "expected series", WARN, with_engine(sample=_WITHOUT_OUTPUT),
        "1 of 26 absent: llm_engine_output_tokens", "its metrics were renamed: report it",
    ),
    AuditCase(
        "bucket edges", WARN,
        evidence(engine=engine(sample=_SGLANG), limits=LatencyLimits(tpot_s=(0.03,))),
        "tpot 0.03 s is between the edges 0.025 and 0.05",
        'as edges, if the engine lets you choose them: {"inter_token_latency"',
    ),
    AuditCase("speculation depth", UNKNOWN, with_engine(sample=_SGLANG), "does not contain it"),
)  # fmt: skip

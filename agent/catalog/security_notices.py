"""Published security notices of vLLM: the versions that each concerns.

A small table, not a scanner: notices about what a client or a model can do to a server. Sources:
the advisory of each, and the record of its CVE in github.com/CVEProject/cvelistV5 or osv.dev, as of
KNOWN_UNTIL.
"""

from dataclasses import dataclass

KNOWN_UNTIL = "2026-11-23"

_ADVISORIES = "https://github.com/vllm-project/vllm/security/advisories/"


@dataclass(frozen=True, slots=True)
class SecurityNotice:
    """One notice: versions from `introduced` (None: all) up to `fixed`, which is not affected.

    `concerns` is what a deployment must have for the notice to matter.
    """

    advisory: str
    cve: str
    published: str
    severity: str
    introduced: str | None
    fixed: str
    effect: str
    concerns: str

    @property
    def url(self) -> str:
        """The page of the advisory."""
        return _ADVISORIES + self.advisory


NOTICES: tuple[SecurityNotice, ...] = (
    SecurityNotice(
        "GHSA-hj4w-hm2g-p6w5", "CVE-2025-32444", "2025-04-30", "critical", "0.6.5", "0.8.5",
        "foreign code runs", "the Mooncake connector",
    ),
    SecurityNotice(
        "GHSA-wr9h-g72x-mwhm", "CVE-2025-59425", "2025-10-07", "high", None, "0.11.0",
        "the API key can be found by timing", "--api-key",
    ),
    SecurityNotice(
        "GHSA-mrw7-hf4f-83pf", "CVE-2025-62164", "2025-11-21", "high", "0.10.2", "0.11.1",
        "a client crashes the server or runs code", "prompt embeddings",
    ),
    SecurityNotice(
        "GHSA-2pc9-4j83-qjmr", "CVE-2026-22807", "2026-01-21", "high", "0.10.1", "0.14.0",
        "a model's files run code without --trust-remote-code", "models of others",
    ),
    SecurityNotice(
        "GHSA-4r2x-xpjr-7cvv", "CVE-2026-22778", "2026-02-02", "critical", "0.8.3", "0.14.1",
        "a client runs code", "models for images or video",
    ),
    SecurityNotice(
        "GHSA-7972-pg2x-xr59", "CVE-2026-27893", "2026-03-26", "high", "0.10.1", "0.18.0",
        "a model's files run code without --trust-remote-code", "Nemotron-VL, Kimi-K2.5",
    ),
    SecurityNotice(
        "GHSA-3mwp-wvh9-7528", "CVE-2026-34756", "2026-04-06", "medium", "0.1.0", "0.19.0",
        "one request with a huge `n` ends the server", "clients that set `n`",
    ),
    SecurityNotice(
        "GHSA-94f4-hr76-p5j6", "CVE-2026-48746", "2026-06-22", "critical", "0.3.0", "0.22.0",
        "a client gets past the API key", "--api-key without a proxy in front",
    ),
    SecurityNotice(
        "GHSA-33cg-gxv8-3p8g", "CVE-2026-55514", "2026-07-06", "medium", "0.12.0", "0.24.0",
        "one request ends the engine", "prompt embeddings with an M-RoPE model",
    ),
    SecurityNotice(
        "GHSA-x6mc-67gf-chw4", "CVE-2026-105758", "2026-10-05", "medium", "0.24.0", "0.30.0",
        "one request fills the server's memory", "Qwen models for video",
    ),
    SecurityNotice(
        "GHSA-85xf-c7hm-whqw", "CVE-2026-105757", "2026-10-05", "medium", None, "0.30.0",
        "one request ends the engine", "structured outputs",
    ),
    SecurityNotice(
        "GHSA-542m-9234-8gvf", "CVE-2026-115911", "2026-10-26", "medium", "0.19.0", "0.32.0",
        "a request's chat template holds the server up", "no --chat-template",
    ),
)  # fmt: skip

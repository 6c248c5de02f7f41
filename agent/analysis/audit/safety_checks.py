"""Checks of who may use the engine, of its version, and of how it stops."""

from functools import partial
from ipaddress import ip_address

from agent.analysis.audit.checks import AuditCheck, CheckResult, failed, passed, unknown, warned
from agent.analysis.audit.known_values import flag, flags_are_known, without_flags
from agent.analysis.audit.versions import is_older, version_key
from agent.catalog.security_notices import KNOWN_UNTIL, NOTICES, SecurityNotice
from agent.records.audit import AuditEvidence, EvidencePart

_CHECK = partial(AuditCheck, "Safety")

_HEALTHY = 200
_GRAVE = frozenset({"critical", "high"})
# The first release whose flag --shutdown-timeout was seen.
_HAS_SHUTDOWN = "0.32.0"


def security_notices(evidence: AuditEvidence) -> CheckResult:
    """Whether a published notice concerns the engine's version."""
    version = evidence.engine.version
    if version_key(version) is None:
        return unknown(evidence.why_unread(EvidencePart.VERSION))
    found = [notice for notice in NOTICES if _concerns(notice, version)]
    if not found:
        return passed(f"{version}: none of the {len(NOTICES)} in our table of {KNOWN_UNTIL}")
    listed = "; ".join(
        f"{each.advisory} ({each.severity}, with {each.concerns}): {each.effect}" for each in found
    )
    newest = max(found, key=lambda notice: version_key(notice.fixed) or ())
    change = f"vLLM {newest.fixed} or newer; {newest.url}"
    grave = any(notice.severity in _GRAVE for notice in found)
    return (failed if grave else warned)(f"{version}: {listed}", change)


def _concerns(notice: SecurityNotice, version: str | None) -> bool:
    introduced = notice.introduced is None or not is_older(version, notice.introduced)
    return introduced and bool(is_older(version, notice.fixed))


def access(evidence: AuditEvidence) -> CheckResult:
    """Whether others than this machine can use the engine without a key."""
    needs_key, addresses = evidence.engine.needs_key, evidence.addresses
    if needs_key is None:
        return unknown(evidence.why_unread(EvidencePart.MODELS))
    if needs_key:
        return passed("a key is needed; /metrics, /health and others are open all the same")
    if addresses is None and not evidence.remote:
        return unknown(f"no key is needed; {evidence.why_unread(EvidencePart.ADDRESSES)}")
    if addresses is None:
        seen = "no key is needed, and we reach it from another machine"
    else:
        seen = f"no key is needed at {', '.join(sorted(addresses))}"
        if all(ip_address(address).is_loopback for address in addresses):
            return passed(f"{seen}, which only this machine reaches")
    return warned(
        seen, "--api-key (VLLM_API_KEY), or --host 127.0.0.1 behind a proxy that asks who"
    )


def health(evidence: AuditEvidence) -> CheckResult:
    """Whether the health check answers."""
    status = evidence.engine.health
    if status == _HEALTHY:
        return passed(f"/health gives {status}")
    seen = "/health does not answer" if status is None else f"/health gives {status}"
    return failed(seen, "read the engine's log, and restart it")


def shutdown(evidence: AuditEvidence) -> CheckResult:
    """Whether a stop lets running requests end."""
    given = flag(evidence, "--shutdown-timeout")
    if given not in (None, "", "0"):
        return passed(f"--shutdown-timeout {given}")
    if is_older(evidence.engine.version, _HAS_SHUTDOWN) is not False:
        return unknown(f"known of vLLM {_HAS_SHUTDOWN} and newer only")
    if not flags_are_known(evidence):
        return unknown(without_flags(evidence))
    return warned(
        "0 s: running requests are aborted", "--shutdown-timeout 30, and as long in the pod"
    )


SAFETY_CHECKS = (
    _CHECK(
        "security notices",
        "clients or model files can do more than they should",
        security_notices,
    ),
    _CHECK("access", "whoever reaches the address uses the GPUs", access),
    _CHECK("health", "orchestrators and load balancers ask it before they send requests", health),
    _CHECK(
        "graceful stop",
        "each restart or upgrade breaks the streams that run at that moment",
        shutdown,
    ),
)

"""Migrates the database to the revision that this version needs."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, MigrationStep
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from agent.errors import StoreUnavailable
from agent.store.clickhouse.connecting import CLICKHOUSE
from agent.store.clickhouse.schema import require_newest_clickhouse, upgrade_clickhouse
from agent.store.connection import for_writing, reading, store_unavailable, without_number

# An arbitrary number that all agents share.
_POSTGRES_LOCK = 730_111_947

# Revisions of development versions, before the first release.
_UNRELEASED = frozenset(("1", *(f"{number:04}" for number in range(1, 23)), "baseline"))


def _scripts_path() -> Path:
    """The folder of migrations: inside an installed package, beside it in a checkout."""
    package = Path(str(files("agent")))
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "migrations"


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_scripts_path()).replace("%", "%%"))
    return config


@cache
def _scripts() -> ScriptDirectory:
    scripts = ScriptDirectory.from_config(_config())
    # Load them now: several threads use them.
    scripts.get_current_head()
    return scripts


@cache
def newest_revision() -> str:
    """The revision that this version of the program needs."""
    head = _scripts().get_current_head()
    assert head is not None, "the package holds no migrations"
    return head


def require_newest(engine: Engine) -> None:
    """Raises StoreUnavailable where a database is at another revision than the newest."""
    if engine.dialect.name == CLICKHOUSE:
        require_newest_clickhouse(engine)
        return
    with reading(engine) as connection:
        found = MigrationContext.configure(connection).get_current_revision()
    if found != newest_revision():
        _require_known(found, _scripts())
        raise StoreUnavailable(
            f"the database is at revision {found}, and this version reads {newest_revision()}; "
            "run `goodput-agent db upgrade` of this version on it"
        )


def _require_known(revision: str | None, scripts: ScriptDirectory) -> None:
    if revision in _UNRELEASED:
        raise StoreUnavailable(
            f"the database is at revision {revision!r} of a version that was never released, and "
            "cannot be migrated; start with a new one: move SQLite's file away, or set the URL of "
            "an empty database"
        )
    if revision not in {None, *(each.revision for each in scripts.walk_revisions())}:
        raise StoreUnavailable(
            f"the database is at revision {revision!r}, which this version does not know (its "
            f"newest is {newest_revision()!r}); start the version that made it, or a newer one"
        )


def upgrade(engine: Engine, revision: str = "head") -> tuple[str | None, str | None]:
    """Migrate the database up to `revision`; returns the revisions before and after.

    Each migration is a transaction: an upgrade that is interrupted goes on at the next start.
    Agents that share a database and start together take turns at each migration. Raises
    StoreUnavailable where the database does not answer or comes from a newer version.
    """
    if engine.dialect.name == CLICKHOUSE:
        return upgrade_clickhouse(engine)
    try:
        return _upgrade(engine, revision)
    except (SQLAlchemyError, CommandError) as error:
        raise store_unavailable("the database cannot be prepared", error) from error


def _upgrade(engine: Engine, revision: str) -> tuple[str | None, str | None]:
    scripts = _scripts()
    path = [None, *reversed([each.revision for each in scripts.walk_revisions("base", revision)])]
    following = dict(pairwise(path))
    before, after = _migrate(engine, scripts, following)
    while after in following:
        _, after = _migrate(engine, scripts, following)
    return before, after


def _migrate(
    engine: Engine, scripts: ScriptDirectory, following: Mapping[str | None, str | None]
) -> tuple[str | None, str | None]:
    """Migrate to the following revision, if any; returns the revisions before and after.

    Raises StoreUnavailable where the database is at a revision that `scripts` do not have.
    """
    with without_number(for_writing(engine)).connect() as connection, connection.begin():
        if engine.dialect.name == "postgresql":
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _POSTGRES_LOCK}
            )
        before = MigrationContext.configure(connection).get_current_revision()
        _require_known(before, scripts)
        after = following.get(before)
        if after is None:
            return before, before
        _run(scripts, after, connection)
    return before, after


def _run(scripts: ScriptDirectory, revision: str, connection: Connection) -> None:
    """Run one migration. `alembic.command.upgrade` would load all of them for each."""
    config = _config()
    config.attributes["connection"] = connection
    step = MigrationStep.upgrade_from_script(scripts.revision_map, scripts.get_revision(revision))
    with EnvironmentContext(config, scripts, fn=lambda *_: [step], destination_rev=revision):
        scripts.run_env()

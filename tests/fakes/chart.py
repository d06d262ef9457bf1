"""The chart of deploy/chart as Helm renders it, and the settings that a process then loads."""

from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.fakes.pages import ROOT
from tokenmesh.cli.arguments import arrange
from tokenmesh.cli.main import known_flags
from tokenmesh.shared.config import Settings, load_settings

CHART = ROOT / "deploy/chart"
KUBERNETES = "1.34"
"""The version of Kubernetes whose schemas the manifests have to match."""
POD_IP = "10.1.2.3"
Manifest = dict[str, Any]
Values = dict[str, Any]

SCALING = {"enabled": True, "minReplicas": 1, "maxReplicas": 4}
RESOURCES = {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi"}}
FULL: Values = {
    "image": {"digests": {"gateway": "sha256:" + "0" * 64}, "pullSecrets": [{"name": "pull"}]},
    "models": [
        {
            "name": "Qwen/Qwen3.5-27B",
            "model": "Qwen/Qwen3.5-27B",
            "replicas": 2,
            "gpus": 1,
            "settings": {"max_model_len": 8192},
            "worker": {"max_num_seqs": 64},
            "resources": RESOURCES,
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "nodeSelector": {"gpu": "h100"},
            "scaling": {**SCALING, "waitingPerWorker": 8, "firstTokenSeconds": 5},
        },
        {
            "name": "small",
            "model": "/models/small",
            "replicas": 3,
            "prefillReplicas": 1,
            "resources": RESOURCES,
        },
    ],
    "encoder": {"replicas": 2, "gpus": 1},
    "gateway": {
        "replicas": 3,
        "keysSecret": {"name": "keys", "key": "keys.toml"},
        "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls"},
    },
    "settings": {"gateway": {"request_timeout_s": 120}},
    "huggingFaceSecret": "hub",
    "modelCache": {"existingClaim": "models"},
    "telemetry": {"otlpEndpoint": "http://collector:4318"},
    "networkPolicies": {
        "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "monitoring": {"serviceMonitor": True, "rules": True, "dashboards": True},
}
EXTERNAL: Values = {
    "nats": {"enabled": False, "externalUrl": "tls://nats.example.com:4333"},
    "valkey": {"enabled": False, "externalUrl": "rediss://valkey.example.com:6379/0"},
    "caSecret": "ca",
    "passwordsSecret": "mine",
}


def render(values: Values) -> list[Manifest]:
    """The manifests of a release named `demo`."""
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(values, name="demo", namespace="llm")
    return [
        manifest
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def component(manifest: Manifest) -> str:
    return str(manifest["metadata"]["labels"]["app.kubernetes.io/component"])


def settings_of(
    deployment: Manifest, manifests: list[Manifest], folder: Path, patch: pytest.MonkeyPatch
) -> Settings:
    """Read the settings as the process does: from its file and its variables."""
    (config,) = (each for name, each in of_kind(manifests, "ConfigMap").items() if "config" in name)
    for name, text in config["data"].items():
        (folder / name).write_text(text)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    words = container["command"] + container.get("args", [])
    assert words[:3] == ["tokenmesh", "serve", component(deployment)]
    arrange(words[3:], known_flags("serve"))
    with patch.context() as inner:
        for variable in container["env"]:
            value = variable.get("value", "secret").replace("$(POD_IP)", POD_IP)
            inner.setenv(variable["name"], value)
        return load_settings(folder / Path(words[words.index("--config") + 1]).name)

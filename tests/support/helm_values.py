"""Values for the Helm chart that tests render it with, by name."""

from __future__ import annotations

from typing import Any

PEM = "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n"

SECURED: dict[str, Any] = {
    "insecure": False,
    "tls": {"enabled": True, "certificate": PEM, "key": PEM, "ca": PEM},
    "tokens": {"enabled": True, "tokens": "a = 1\n", "poolToken": "secret"},
}
GPU: dict[str, Any] = {
    "members": {
        "replicas": 4,
        "devices": ["cuda", "cpu:threads=4"],
        "gpu": {"count": 1},
        "runtimeClassName": "nvidia",
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "cache": {"size": "200GiB", "volumeSize": "250Gi", "persistent": True, "storageClassName": "fast"},
    }
}
MONITORED: dict[str, Any] = {
    "metrics": {
        "enabled": True,
        "namespace": "prometheus",
        "serviceMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
    }
}
EVERYTHING: dict[str, Any] = (
    GPU
    | {
        "fullnameOverride": "compute",
        "image": {
            "repository": "registry.example/heliograph",
            "digest": "sha256:" + "0123456789abcdef" * 4,
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "registry"}],
        },
        "members": GPU["members"]
        | {
            "modelsClaim": "models",
            "config": {"max_connections": 1000, "limits": {"tensors": 50000}, "shared_memory": False},
            "env": [{"name": "MALLOC_ARENA_MAX", "value": "2"}],
            "priorityClassName": "batch",
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 1,
                            "podAffinityTerm": {
                                "topologyKey": "topology.kubernetes.io/zone",
                                "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "heliograph"}},
                            },
                        }
                    ]
                }
            },
            "podAnnotations": {"example.org/note": "yes"},
            "podLabels": {"team": "inference"},
        },
        "head": {
            "replicas": 2,
            "cache": {"size": "5GiB", "volumeSize": "6Gi"},
            "poolSilenceSeconds": 2.5,
            "config": {"quota": {"sessions": 10}},
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "topology.kubernetes.io/zone",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "head"}},
                }
            ],
            "service": {"type": "LoadBalancer", "annotations": {"example.org/internal": "true"}},
        },
        "listenHost": "[::]",
        "drainSeconds": 120,
        "pauseSeconds": 10,
        "log": {"level": "debug", "format": "human"},
        "insecure": False,
        "tls": {
            "enabled": True,
            "clientCertificates": True,
            "certManager": {
                "enabled": True,
                "issuer": {"name": "ours", "kind": "ClusterIssuer"},
                "dnsNames": ["heliograph.example.org"],
            },
        },
        "tokens": {"enabled": True, "existingSecret": "our-tokens"},
        "traces": "http://collector.tracing:4317",
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "clients"}}}],
            "egress": [{"to": [{"namespaceSelector": {}}], "ports": [{"port": 4317, "protocol": "TCP"}]}],
        },
        "serviceAccount": {"annotations": {"example.org/role": "none"}},
        "commonLabels": {"app.kubernetes.io/part-of": "inference"},
    }
    | MONITORED
)
SERVING: dict[str, Any] = {**SECURED, "head": {"modelsClaim": "models", "kserve": True}}
DURABLE: dict[str, Any] = {
    "members": {
        "state": {"volumeSize": "50Gi", "storageClassName": "fast"},
        "cache": {"persistent": True},
    },
    "head": {"state": {"volumeSize": "10Gi"}},
}
IN_MEMBER: dict[str, Any] = {
    "members": {"config": {"kept_state_size": "4GiB"}},
    "head": {"state": {"url": "grpcs://heliograph-members-0.heliograph-members:7070/head"}},
}
MINIMAL: dict[str, Any] = {
    "members": {"replicas": 1, "cache": {"size": ""}, "resources": {}},
    "head": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "serviceAccount": {"create": False},
    "pauseSeconds": 0,
}

SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "tls and tokens": SECURED,
    "gpu": GPU,
    "monitoring": MONITORED,
    "state in a member": IN_MEMBER,
    "serving models": SERVING,
    "durable sessions": DURABLE,
    "everything": EVERYTHING,
    "minimal": MINIMAL,
}

#: Values that are refused, and what is said of each.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"member": {}}, "member"),
    ({"members": {"replicas": -1}}, "replicas"),
    ({"members": {"replicas": "two"}}, "replicas"),
    ({"members": {"devices": []}}, "devices"),
    ({"members": {"gpus": 1}}, "gpus"),
    ({"members": {"cache": {"size": "10GB"}}}, "size"),
    ({"head": {"replicas": 0}}, "replicas"),
    ({"head": {"kserve": True}}, "head.kserve needs head.modelsClaim"),
    ({"head": {"replicas": 2, "state": {"volumeSize": "1Gi"}}}, "head.replicas=1"),
    ({"members": {"state": {"volumeSize": "much"}}}, "volumeSize"),
    ({"head": {"replicas": 2, "state": {"url": "grpcs://m:7070/head"}}}, "head.replicas=1"),
    ({"head": {"state": {"url": "grpcs://m:7070/head", "volumeSize": "1Gi"}}}, "in one place"),
    ({"head": {"state": {"url": "/tmp/state"}}}, "url"),
    ({"members": {"config": {"state": "/tmp/state"}}}, "state"),
    ({"head": {"config": {"kserve": "0.0.0.0:1"}}}, "kserve"),
    ({"head": {"service": {"type": "Ingress"}}}, "type"),
    ({"image": {"digest": "latest"}}, "digest"),
    ({"ports": {"grpc": 80}}, "grpc"),
    ({"drainSeconds": -1}, "drainSeconds"),
    ({"drainSeconds": "30s"}, "drainSeconds"),
    ({"runAsUser": 0}, "runAsUser"),
    ({"log": {"level": "verbose"}}, "level"),
    ({"traces": "collector:4317"}, "traces"),
    ({"members": {"config": {"limits": {"tensors": {"a": 1}}}}}, "config"),
    ({"members": {"config": {"drain_seconds": 5}}}, "drain_seconds"),
    ({"tls": {"enabled": True}}, "tls.existingSecret"),
    ({"tokens": {"enabled": True, "existingSecret": "a"}}, "in plain text"),
    (SECURED | {"tokens": {"enabled": True}}, "tokens.existingSecret"),
    ({"insecure": False}, "insecure"),
    ({"metrics": {"serviceMonitor": {"enabled": True}}}, "metrics.enabled"),
    ({"tls": {"enabled": True, "certManager": {"enabled": True}}}, "issuer"),
]

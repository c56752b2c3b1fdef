"""The Helm chart: linted, rendered for several sets of values, and what comes out held against Kubernetes'
own schemas, its restricted profile for pods, and the daemon's reading of its configuration. No cluster is
asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest
from helm_values import REFUSED, SETS
from paths import DEPLOY

from heliograph.cli import parse
from heliograph_proto.types import parse_size
from heliograph_server.auth.clients import parse_clients
from heliograph_server.config.config import ServerConfig, load_config
from heliograph_server.pool.discovery import DnsSource, open_source
from heliograph_server.resources.principals import Right

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

Document: TypeAlias = "dict[str, Any]"

CHART = DEPLOY / "helm/heliograph"
#: The oldest that the chart is for, and the newest whose schemas are known.
VERSIONS = ("1.30", "1.37")
#: What other projects define, and so Kubernetes' schemas do not have.
CUSTOM = {"ServiceMonitor": "monitoring.coreos.com/v1", "Certificate": "cert-manager.io/v1"}
NAMES = list(SETS)


def texts_of(values: dict[str, Any]) -> dict[str, str]:
    """What each template renders to."""
    with helm.Chart.load(CHART) as chart:
        found: dict[str, str] = chart.render(values, name="demo", namespace="compute")
    return found


def documents_of(values: dict[str, Any]) -> list[Document]:
    found = []
    for name, text in texts_of(values).items():
        if name.endswith(".yaml"):
            found += [one for one in yaml.safe_load_all(text) if one]
    return found


@pytest.fixture(params=NAMES)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return documents_of(SETS[request.param])


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [one for one in documents if one["kind"] == kind]


def pods(documents: list[Document]) -> Iterator[Document]:
    """Specifications of the daemons' pods, whoever makes them."""
    for one in documents:
        if one["kind"] in ("StatefulSet", "Deployment"):
            yield one["spec"]["template"]["spec"]


def all_pods(documents: list[Document]) -> list[Document]:
    """And of those that test."""
    return [*pods(documents), *(one["spec"] for one in of_kind(documents, "Pod"))]


def containers(pod: Document) -> list[Document]:
    return [*pod["containers"], *pod.get("initContainers", ())]


def configurations(documents: list[Document], folder: Path) -> dict[str, ServerConfig]:
    """What daemons would read, by role. Raises ConfigurationError."""
    found = {}
    for one in of_kind(documents, "ConfigMap"):
        path = folder / f"{one['metadata']['name']}.toml"
        path.write_text(one["data"]["heliograph.toml"])
        found[one["metadata"]["labels"]["app.kubernetes.io/component"]] = load_config(path)
    return found


# As Helm sees it


@pytest.mark.parametrize("name", NAMES)
def test_helm_finds_nothing_to_complain_of(name: str) -> None:
    report = helm.lint(CHART, SETS[name], strict=True, namespace="compute")
    assert report["errors"] in (None, [])
    # An icon is for shops.
    assert [one for one in report["messages"] or () if "icon" not in one["error"]] == []


@pytest.mark.parametrize(("values", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_values_that_are_wrong_are_refused_with_their_name(values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        texts_of(values)
    assert why in str(refused.value)


def test_every_value_is_commented_and_has_a_default_and_a_schema() -> None:
    text = (CHART / "values.yaml").read_text()
    blocks = [
        block for block in text.split("\n\n") if not all(line.startswith("#") for line in block.split("\n"))
    ]
    assert [block for block in blocks if not block.startswith("#")] == []
    schema = json.loads((CHART / "values.schema.json").read_text())
    # What a chart is given that is part of another.
    del schema["properties"]["global"]
    check_same(yaml.safe_load(text), schema, "")


def check_same(values: dict[str, Any], schema: dict[str, Any], where: str) -> None:
    """Each object of the schema that is closed has exactly the keys that there are defaults for."""
    assert values.keys() == schema["properties"].keys(), where
    for name, value in values.items():
        inner = schema["properties"][name]
        if "properties" in inner:
            check_same(value, inner, f"{where}.{name}")


def test_the_notes_say_where_it_is_found_and_who_may_use_it() -> None:
    notes = {name: texts_of(values)["heliograph/templates/NOTES.txt"] for name, values in SETS.items()}
    assert "grpc://demo-heliograph.compute.svc:7070" in notes["default"]
    assert "No token is required" in notes["default"] and "NOTHING" in notes["minimal"]
    assert "grpcs://compute.compute.svc:7070" in notes["everything"]
    assert "No token" not in notes["everything"] and "heliograph.example.org" in notes["everything"]


# As Kubernetes sees it


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(documents: list[Document], version: str) -> None:
    assert documents
    for one in documents:
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(one, version, strict=True)


def test_what_kubernetes_does_not_know_would_be_found() -> None:
    found = documents_of({})
    next(pods(found))["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        for one in found:
            kubernetes_validate.validate(one, VERSIONS[-1], strict=True)


def test_objects_of_other_projects_say_what_those_ask_for() -> None:
    found = documents_of(SETS["everything"])
    for kind, version in CUSTOM.items():
        assert [one["apiVersion"] for one in of_kind(found, kind)] == [version]
    [monitor], [certificate] = of_kind(found, "ServiceMonitor"), of_kind(found, "Certificate")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    # By which name the rules of deploy/prometheus go.
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/name"
    [endpoint] = monitor["spec"]["endpoints"]
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    services = [one for one in of_kind(found, "Service") if chosen <= one["metadata"]["labels"].items()]
    assert len(services) == 2
    assert all(endpoint["port"] in [port["name"] for port in one["spec"]["ports"]] for one in services)
    spec = certificate["spec"]
    assert spec["issuerRef"] == {"name": "ours", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    assert {"server auth", "client auth"} <= {*spec["usages"]}
    assert {"compute.compute.svc", "compute-members.compute.svc", "heliograph.example.org"} <= {
        *spec["dnsNames"]
    }
    assert all(
        {"secretName": spec["secretName"], "defaultMode": 0o440}
        in [volume.get("secret") for volume in pod["volumes"]]
        for pod in all_pods(found)
    )


def test_pods_keep_to_the_restricted_profile(documents: list[Document]) -> None:
    """Kubernetes' Pod Security Standards, "restricted"; and no token of the cluster's, no writable root."""
    allowed = {"configMap", "emptyDir", "secret", "persistentVolumeClaim"}
    for pod in all_pods(documents):
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.keys()
        assert pod["automountServiceAccountToken"] is False
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {key for one in pod.get("volumes", ()) for key in one if key != "name"} <= allowed
        for one in containers(pod):
            context = one["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert not {"privileged", "procMount", "runAsUser"} & context.keys()
            assert not any("hostPort" in port for port in one.get("ports", ()))


def test_what_is_mounted_is_there_and_what_is_chosen_exists(documents: list[Document]) -> None:
    made = {one["metadata"]["name"] for kind in ("ConfigMap", "Secret") for one in of_kind(documents, kind)}
    for one in documents:
        if one["kind"] not in ("StatefulSet", "Deployment"):
            continue
        spec = one["spec"]
        labels = spec["template"]["metadata"]["labels"].items()
        assert spec["selector"]["matchLabels"].items() <= labels
        volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
        for container in containers(spec["template"]["spec"]):
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys() | claims
        assert volumes["config"]["configMap"]["name"] in made
    for one in [*of_kind(documents, "Service"), *of_kind(documents, "PodDisruptionBudget")]:
        selector = one["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        assert any(selector.items() <= found for found in pod_labels(documents))


def pod_labels(documents: list[Document]) -> list[Any]:
    return [
        one["spec"]["template"]["metadata"]["labels"].items()
        for one in documents
        if one["kind"] in ("StatefulSet", "Deployment")
    ]


def test_an_image_may_be_named_by_its_digest() -> None:
    found = {one["image"] for pod in pods(documents_of(SETS["everything"])) for one in containers(pod)}
    assert found == {"registry.example/heliograph@sha256:" + "0123456789abcdef" * 4}
    found = {one["image"] for pod in pods(documents_of({})) for one in containers(pod)}
    assert found == {"heliograph:0.1.0"}


def test_gpus_are_asked_for_where_they_are() -> None:
    found = documents_of(SETS["gpu"])
    [members], [head] = of_kind(found, "StatefulSet"), of_kind(found, "Deployment")
    pod = members["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "1"}
    assert pod["runtimeClassName"] == "nvidia" and pod["tolerations"] and pod["nodeSelector"]
    assert "nvidia.com/gpu" not in str(head)
    [claim] = members["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"


def test_policies_let_in_the_head_members_clients_and_monitoring_alone() -> None:
    found = {
        one["metadata"]["name"]: one["spec"]
        for one in of_kind(documents_of(SETS["everything"]), "NetworkPolicy")
    }
    assert found.keys() == {"compute-members", "compute-head"}
    within, clients, monitoring = found["compute-members"]["ingress"]
    roles = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in within["from"]]
    assert sorted(roles) == ["head", "members"]
    assert clients["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "clients"}}}
    ]
    assert monitoring["ports"] == [{"port": 9464, "protocol": "TCP"}]
    assert found["compute-head"]["ingress"] == [clients, monitoring]
    for one in found.values():
        assert one["policyTypes"] == ["Ingress", "Egress"]
        assert {port["port"] for rule in one["egress"] for port in rule["ports"]} == {7070, 53, 4317}


def test_served_models_have_ports_that_clients_reach(tmp_path: Path) -> None:
    documents = documents_of({**SETS["serving models"], "networkPolicy": {"clients": [{"podSelector": {}}]}})
    found = configurations(documents, tmp_path)
    assert found["head"].kserve == "grpcs://0.0.0.0:8001"
    assert found["head"].kserve_http == "https://0.0.0.0:8000"
    assert found["head"].models == "/srv/models" and not found["members"].kserve
    [service] = [one for one in of_kind(documents, "Service") if "members" not in one["metadata"]["name"]]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert (ports["kserve"], ports["kserve-http"]) == (8001, 8000)
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(documents, "NetworkPolicy")}
    reached = {port["port"] for rule in policies["demo-heliograph-head"]["ingress"] for port in rule["ports"]}
    assert {7070, 8001, 8000} <= reached
    within = policies["demo-heliograph-members"]["ingress"]
    assert not {port["port"] for rule in within for port in rule["ports"]} & {8000, 8001}


# As the daemon sees it


def test_the_daemon_accepts_its_configuration(documents: list[Document], tmp_path: Path) -> None:
    assert configurations(documents, tmp_path)


def test_the_daemon_is_told_what_the_values_say(tmp_path: Path) -> None:
    found = configurations(documents_of(SETS["everything"]), tmp_path)
    members, head = found["members"], found["head"]
    assert members.listen == head.listen == ("grpcs://[::]:7070",)
    assert members.devices == ("cuda", "cpu:threads=4") and head.devices == ("cpu:threads=1",)
    assert (
        members.max_connections == 1000 and members.shared_memory is False and members.limits.tensors == 50000
    )
    assert members.cache_size == parse_size("200GiB") and head.cache_size == parse_size("5GiB")
    assert members.pool == "" and "compute-members.compute.svc:7070" in head.pool
    assert head.pool_silence_seconds == 2.5 and head.quota.sessions == 10
    assert members.log_format == "human" and members.log_level == "debug"
    assert head.traces == "http://collector.tracing:4317"
    assert not members.insecure and members.tls_client_ca and members.pool_key and members.tokens


def test_without_tokens_the_daemons_own_certificate_has_the_right_of_a_pool(tmp_path: Path) -> None:
    more = '[[client]]\nmatch = "CN:ops"\ntenant = "operators"\nrights = ["admin"]\n'
    tls = {"enabled": True, "existingSecret": "ours", "clientCertificates": True, "clients": more}
    documents = documents_of({"insecure": False, "tls": tls})
    host = "demo-heliograph-members.compute.svc"
    assert len(found := of_kind(documents, "ConfigMap")) == 2
    for one in found:
        own, operators = parse_clients(one["data"]["clients.toml"], "clients.toml")
        assert own.matches([("DNS", host)]) and own.rights == {Right.USE, Right.POOL}
        assert operators.matches([("CN", "ops")]) and operators.rights == {Right.ADMIN}
    for config in configurations(documents, tmp_path).values():
        assert Path(config.tls_clients).name == "clients.toml" and config.tls_client_ca


@pytest.mark.parametrize("name", [name for name in NAMES if name != "minimal"])
def test_the_head_finds_its_members_by_the_name_of_their_service(name: str, tmp_path: Path) -> None:
    documents = documents_of(SETS[name])
    head = configurations(documents, tmp_path)["head"]
    assert isinstance(open_source(head.pool), DnsSource)
    [service] = [one for one in of_kind(documents, "Service") if one["spec"].get("clusterIP") == "None"]
    [members] = of_kind(documents, "StatefulSet")
    assert members["spec"]["serviceName"] == service["metadata"]["name"]
    where = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    port = service["spec"]["ports"][0]["port"]
    assert head.pool == f"dns:{'grpcs://' if head.tls_certificate else ''}{where}:{port}"
    for certificate in of_kind(documents, "Certificate"):
        assert where in certificate["spec"]["dnsNames"]


def test_files_that_the_configuration_names_are_mounted(documents: list[Document], tmp_path: Path) -> None:
    found = configurations(documents, tmp_path)
    for one in documents:
        if one["kind"] not in ("StatefulSet", "Deployment"):
            continue
        role = one["metadata"]["labels"]["app.kubernetes.io/component"]
        pod = one["spec"]["template"]["spec"]
        mounts = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        for name in (
            "tls_certificate",
            "tls_key",
            "tls_client_ca",
            "tokens",
            "pool_token",
            "pool_ca",
            "cache",
            "models",
            "state",
        ):
            value = getattr(found[role], name)
            if value and "://" not in value:
                assert any(value == mount or value.startswith(f"{mount}/") for mount in mounts), value


def test_ports_and_probes_are_those_where_the_daemon_listens(
    documents: list[Document], tmp_path: Path
) -> None:
    config = configurations(documents, tmp_path)["members"]
    for pod in pods(documents):
        [container] = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert config.addresses[0].port == ports["grpc"]
        assert config.health_listen.endswith(f":{ports['health']}")
        assert config.metrics_listen.rpartition(":")[2] == str(ports.get("metrics", ""))
        probes = {name: container[f"{name}Probe"]["grpc"] for name in ("startup", "liveness", "readiness")}
        assert {probe["port"] for probe in probes.values()} == {ports["health"]}
        services = [probes[name]["service"] for name in ("startup", "liveness", "readiness")]
        assert services == ["live", "live", "ready"]


def test_pods_are_given_longer_than_draining_takes(documents: list[Document], tmp_path: Path) -> None:
    for config in configurations(documents, tmp_path).values():
        for pod in pods(documents):
            assert pod["terminationGracePeriodSeconds"] >= config.drain_seconds + 30


def test_a_cache_is_smaller_than_its_volume(documents: list[Document], tmp_path: Path) -> None:
    found = configurations(documents, tmp_path)
    for one in of_kind(documents, "StatefulSet"):
        claims = [
            claim["spec"]["resources"]["requests"]["storage"]
            for claim in one["spec"].get("volumeClaimTemplates", ())
            if claim["metadata"]["name"] == "cache"
        ]
        volumes = one["spec"]["template"]["spec"]["volumes"]
        claims += [v["emptyDir"]["sizeLimit"] for v in volumes if v["name"] == "cache"]
        [size] = claims
        if found["members"].cache:
            assert found["members"].cache_size < (parse_size(re.sub("i$", "iB", size)) or 0)


def test_the_state_of_the_head_may_lie_in_the_memory_of_a_member(tmp_path: Path) -> None:
    url = "grpcs://heliograph-members-0.heliograph-members:7070/head"
    documents = documents_of(SETS["state in a member"])
    found = configurations(documents, tmp_path)
    place = found["head"].state_elsewhere
    assert place is not None and place.name == "head" and str(place.address) == url.removesuffix("/head")
    assert found["members"].kept_state_size == 4 * 2**30 and not found["members"].state
    [head] = of_kind(documents, "Deployment")
    assert head["spec"]["strategy"] == {"type": "Recreate"} and head["spec"]["replicas"] == 1
    assert not of_kind(documents, "PersistentVolumeClaim")


def test_the_state_of_sessions_has_claims_that_outlive_pods(tmp_path: Path) -> None:
    documents = documents_of(SETS["durable sessions"])
    found = configurations(documents, tmp_path)
    # The daemon makes the folder: a volume itself may be open to others.
    assert found["members"].state == found["head"].state == "/var/lib/heliograph/state"
    [members] = of_kind(documents, "StatefulSet")
    claims = {one["metadata"]["name"]: one["spec"] for one in members["spec"]["volumeClaimTemplates"]}
    assert claims.keys() == {"cache", "state"}
    assert claims["state"]["resources"]["requests"]["storage"] == "50Gi"
    assert claims["state"]["storageClassName"] == "fast"
    [head] = of_kind(documents, "Deployment")
    # Two daemons never use one claim.
    assert head["spec"]["strategy"] == {"type": "Recreate"} and head["spec"]["replicas"] == 1
    [claim] = of_kind(documents, "PersistentVolumeClaim")
    named = [
        one["persistentVolumeClaim"]["claimName"]
        for one in head["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in one
    ]
    assert named == [claim["metadata"]["name"]]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_chart_tests_itself_by_a_command_that_there_is(documents: list[Document]) -> None:
    [tester] = of_kind(documents, "Pod")
    [container] = tester["spec"]["containers"]
    assert container["command"] == ["heliograph"]
    parsed, _ = parse(container["args"])
    assert parsed.command == "health" and parsed.service == "ready" and parsed.wait > 0
    host = urlsplit(parsed.server).hostname or ""
    services = [one["metadata"] for one in of_kind(documents, "Service")]
    assert host in [f"{one['name']}.{one['namespace']}.svc" for one in services]
    assert tester["metadata"]["labels"]["app.kubernetes.io/component"] == "test"

"""The Kubernetes manifests: valid by the published schemas, and every name in them leads somewhere.

No cluster is needed. The base is read from its files on every machine; overlays are rendered where there is
kubectl or kustomize.
"""

from __future__ import annotations

import copy
import importlib
import re
import shutil
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from kubernetes_manifests import (
    BASE,
    KUBERNETES,
    OVERLAYS,
    Manifests,
    as_written,
    rendered,
    renderer,
    without_hash,
)

from shared.config import Config, load_config
from shared.entry import parse_arguments
from shared.keys import make_keys, read_keys
from shared.placement import replay_of

OLDEST, NEWEST = "1.29", "1.37"  # releases of Kubernetes
README = (KUBERNETES / "README.md").read_text()
BINDING = {"param-server", "replay"}
EVERYBODY = {"param-server", "replay", "learner", "actor"}
ROOT = KUBERNETES.parents[1]
# What the image itself sets.
IMAGE = dict(re.findall(r"(ROOKERY_\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))
UID = 10001

RENDERED = [*OVERLAYS, "README's own"] if renderer() else []
needs_renderer = pytest.mark.skipif(
    not renderer(),
    reason="neither kubectl (1.24 or newer) nor kustomize is here: of the overlays only names are checked",
)


def test_the_readme_names_the_releases_that_are_tested() -> None:
    """What we claim is what we check."""
    assert f"Kubernetes {OLDEST} to {NEWEST}" in README


@pytest.fixture(scope="module", params=["base", *RENDERED])
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    """The base, every overlay, and the overlay that the README tells readers to write."""
    name = request.param
    if name == "base":
        return Manifests(name, as_written())
    if name in OVERLAYS:
        return Manifests(name, rendered(KUBERNETES / "overlays" / name))
    (own,) = re.findall(r"```yaml\n(# overlays/mine/kustomization.yaml\n.*?)```", README, re.DOTALL)
    copy_of_deploy = tmp_path_factory.mktemp("kubernetes")
    shutil.copytree(BASE, copy_of_deploy / "base")
    folder = copy_of_deploy / "overlays" / "mine"
    folder.mkdir(parents=True)
    (folder / "kustomization.yaml").write_text(own)
    return Manifests(name, rendered(folder))


@needs_renderer
def test_rendered_base_is_what_its_files_say() -> None:
    """What is checked without a renderer is what is applied with one."""
    assert without_hash(rendered(BASE)) == without_hash(as_written())


# --- by the schemas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [OLDEST, NEWEST])
def test_every_object_is_valid_by_the_strict_schema_of_the_release(
    manifests: Manifests, release: str
) -> None:
    """Types and required fields are right, and no field is unknown."""
    for each in manifests.objects:
        assert kubernetes_validate.validate(each, release, strict=True) == release


def test_a_misspelt_field_is_refused() -> None:
    """The schemas that we check against do know which fields there are."""
    workload = copy.deepcopy(Manifests("base", as_written()).of("StatefulSet")["replay"])
    workload["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(workload, NEWEST, strict=True)


# --- names that lead somewhere ------------------------------------------------------------------------------


def test_no_object_is_there_twice_and_all_carry_our_label(manifests: Manifests) -> None:
    """`kubectl get all -l app.kubernetes.io/name=rookery` shows everything."""
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests.objects]
    assert len(names) == len(set(names))
    for each in manifests.objects:
        assert each["metadata"]["labels"]["app.kubernetes.io/name"] == "rookery"
    assert set(manifests.containers) == EVERYBODY


def test_selectors_select_the_pods_of_their_own_service_alone(manifests: Manifests) -> None:
    """Workloads own their pods, services lead to them, and budgets count them."""
    for name, container in manifests.containers.items():
        assert manifests.selected(container.workload["spec"]["selector"]["matchLabels"]) == {name}
    for name, service in manifests.of("Service").items():
        assert manifests.selected(service["spec"]["selector"]) == {name}
    for name, budget in manifests.of("PodDisruptionBudget").items():
        assert manifests.selected(budget["spec"]["selector"]["matchLabels"]) == {name}
    assert set(manifests.of("Service")) == BINDING


def test_services_are_headless_and_lead_to_pods_that_are_not_ready_yet(manifests: Manifests) -> None:
    """A service that waits for others must be found by them, and one address is one pod."""
    for name, service in manifests.of("Service").items():
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert manifests.of("StatefulSet")[name]["spec"]["serviceName"] == name


def test_ports_of_pods_services_and_policies_are_the_same(manifests: Manifests) -> None:
    """A port that one of them forgets is a door that stays shut."""
    allowed: dict[str, list[int]] = {name: [] for name in EVERYBODY}
    for policy in manifests.of("NetworkPolicy").values():
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"].get("ingress", []):
            (peers,) = rule["from"]
            assert manifests.selected(peers["podSelector"]["matchLabels"]) == EVERYBODY
            for name in manifests.selected(policy["spec"]["podSelector"]["matchLabels"]):
                allowed[name] += [port["port"] for port in rule["ports"]]
    for name in BINDING:
        ports = manifests.containers[name].ports
        assert manifests.service_ports(name) == ports
        assert sorted(allowed.pop(name)) == sorted(ports.values())
    assert allowed == {"learner": [], "actor": []}
    assert not any(manifests.containers[name].ports for name in allowed)


def test_a_policy_closes_every_pod_to_what_no_other_policy_allows(manifests: Manifests) -> None:
    """Pods that no policy selects are open to everybody."""
    closed = manifests.of("NetworkPolicy")["rookery-closed"]["spec"]
    assert manifests.selected(closed["podSelector"]["matchLabels"]) == EVERYBODY
    assert "ingress" not in closed


def test_endpoints_are_the_names_and_ports_of_services(manifests: Manifests) -> None:
    """Every endpoint leads to one pod, at the port of that name."""
    endpoints = config_of(manifests).endpoints
    reachable = dict(manifests.pod_names())
    addresses = [("params", endpoints.params), ("broadcast", endpoints.broadcast)]
    for number, replay in enumerate(endpoints.replay):
        addresses += [("segments", replay.segments), ("requests", replay.requests)]
        assert urlsplit(replay.requests).hostname == f"replay-{number}.replay"  # it binds as this number
    for port_name, endpoint in addresses:
        parts = urlsplit(endpoint)
        assert parts.scheme == "tcp"
        assert parts.hostname is not None
        assert manifests.service_ports(reachable[parts.hostname])[port_name] == parts.port
    assert len(addresses) == len({endpoint for _name, endpoint in addresses})


def test_every_container_gets_the_config_and_the_same_image(manifests: Manifests) -> None:
    """One config and one image for all; on GPUs learners have an image of their own."""
    (config,) = manifests.of("ConfigMap")
    for container in manifests.containers.values():
        assert container.spec["envFrom"] == [{"configMapRef": {"name": config}}]
    images = {name: container.spec["image"] for name, container in manifests.containers.items()}
    own = {"learner": images.pop("learner")} if manifests.name == "gpu" else {}
    assert own in ({}, {"learner": "rookery:cuda"})
    assert len(set(images.values())) == 1


# --- what the services need ---------------------------------------------------------------------------------


def config_of(manifests: Manifests) -> Config:
    return load_config(environment=IMAGE | manifests.environment)


def test_config_fits_the_number_of_learners_and_replay_services(manifests: Manifests) -> None:
    """Every agent that learns has a learner and a replay service to keep its experience."""
    config = config_of(manifests)
    assert config.run.minutes is None
    assert manifests.of("Deployment")["learner"]["spec"]["replicas"] == len(config.learning_agents)
    keepers = {replay_of(config, config.learning_agents, agent) for agent in config.learning_agents}
    assert keepers == set(range(manifests.of("StatefulSet")["replay"]["spec"]["replicas"]))
    assert manifests.of("StatefulSet")["param-server"]["spec"]["replicas"] == 1


def test_commands_are_modules_that_understand_their_arguments(manifests: Manifests) -> None:
    """Each starts its own service; a pod of replay takes its number from its place in the set."""
    for name, container in manifests.containers.items():
        python, flag, module, *arguments = container.spec["command"]
        service = name.replace("-", "_")
        assert [python, flag, module] == ["python", "-m", f"services.{service}"]
        entry = importlib.import_module(f"{module}.__main__")
        given = [argument.replace("$(REPLAY_NUMBER)", "1") for argument in arguments]
        options = parse_arguments(service, "", getattr(entry, "add_arguments", None), given)
        assert getattr(options, "number", 1) == 1
    (number,) = manifests.containers["replay"].spec["env"]
    assert number["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert number["name"] == "REPLAY_NUMBER"


def test_only_services_that_listen_get_the_secret_that_proves_who_they_are(
    manifests: Manifests, tmp_path: Path
) -> None:
    """Everybody gets the keys that it needs and no other."""
    made = make_keys(tmp_path / "all")
    for name, container in manifests.containers.items():
        (tmp_path / name).mkdir()
        for key in container.keys:
            shutil.copy(tmp_path / "all" / key, tmp_path / name / key)
        keys_of_pod = read_keys(tmp_path / name)
        if name in BINDING:
            assert keys_of_pod.server().public == keys_of_pod.server_public
            assert keys_of_pod.member.public in keys_of_pod.members()
            assert container.keys == set(made)
        else:
            assert container.keys == {"server.public", "member.secret"}
        keys = container.mounts[IMAGE["ROOKERY_SECURITY__KEYS"]]
        assert keys["mount"]["readOnly"] is True
        assert keys["secret"]["secretName"] == "rookery-keys"
        assert all(item["key"] == item["path"] for item in keys["secret"]["items"])
        # The files are root's; kubelet gives them to the group fsGroup.
        assert keys["secret"]["defaultMode"] == 0o440
        assert container.pod["securityContext"]["fsGroup"] == UID


def test_pods_fit_the_restricted_security_standard(manifests: Manifests) -> None:
    """They can be run in a namespace that enforces it, and go further: nothing but volumes can be written."""
    for container in manifests.containers.values():
        pod, spec = container.pod, container.spec
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["shareProcessNamespace"] is True
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert spec["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
        assert not any("hostPort" in port for port in spec.get("ports", []))
        kinds = {kind for volume in container.volumes.values() for kind in volume} - {"name"}
        assert kinds <= {"secret", "emptyDir", "claim"}


def test_only_parameter_server_and_replay_have_volumes_one_for_each_pod(manifests: Manifests) -> None:
    """State has one owner: the claim is made for each pod, and no second pod may have it."""
    for name, container in manifests.containers.items():
        mine = {IMAGE["ROOKERY_RUN__DIR"]} if name in BINDING else set()
        assert set(container.mounts) == {"/keys", "/tmp"} | mine
        assert {mount["mount"]["name"] for mount in container.mounts.values()} == set(container.volumes)
        assert container.mounts["/tmp"]["emptyDir"]["sizeLimit"]
        if name in BINDING:
            (mode,) = container.mounts["/data"]["claim"]["accessModes"]
            assert mode == ("ReadWriteOnce" if manifests.name == "README's own" else "ReadWriteOncePod")
            assert container.workload["spec"]["persistentVolumeClaimRetentionPolicy"] == {
                "whenDeleted": "Retain",
                "whenScaled": "Retain",
            }


def test_probes_ask_the_service_and_are_more_patient_than_its_own_deadlines(manifests: Manifests) -> None:
    """A service that waits for others is not restarted, and a stuck learner ends by itself before it is."""
    assert PurePath(IMAGE["ROOKERY_RUN__HEALTH_SOCKET"]).parent == PurePath("/tmp")  # which can be written
    alive = {"command": ["python", "-m", "shared.health", "--alive"]}
    for container in manifests.containers.values():
        assert container.spec["readinessProbe"]["exec"] == {"command": alive["command"][:-1]}
        for probe in (container.spec["startupProbe"], container.spec["livenessProbe"]):
            assert probe["exec"] == alive
            patience_s = probe["periodSeconds"] * (probe["failureThreshold"] - 1)
            assert patience_s > config_of(manifests).learner.update_deadline_s
        assert container.pod["terminationGracePeriodSeconds"] >= 30


def test_every_container_says_what_it_needs(manifests: Manifests) -> None:
    """Memory is bounded, also where /tmp is made of it; processors are asked for and not limited."""
    for container in manifests.containers.values():
        resources = container.spec["resources"]
        assert set(resources["requests"]) >= {"cpu", "memory"}
        assert "memory" in resources["limits"]
        assert "cpu" not in resources["limits"]


def test_applying_again_keeps_the_number_of_actors(manifests: Manifests) -> None:
    """`kubectl scale deployment/actor` is not undone."""
    assert "replicas" not in manifests.of("Deployment")["actor"]["spec"]


@needs_renderer
def test_gpu_learners_ask_for_a_gpu_and_stay_what_they_were_else() -> None:
    """The overlay adds a GPU, its nodes and an image; nothing gets lost on the way."""
    gpu, base = Manifests("gpu", rendered(KUBERNETES / "overlays/gpu")), Manifests("base", as_written())
    learner, before = gpu.containers["learner"], base.containers["learner"]
    assert learner.spec["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert learner.pod["nodeSelector"]
    on_gpus = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert learner.pod["tolerations"] == [*before.pod["tolerations"], on_gpus]
    assert learner.spec["command"] == before.spec["command"]
    assert learner.keys == before.keys
    old, new = without_hash(base.objects), without_hash(gpu.objects)
    changed = {key for key in old | new if old.get(key) != new.get(key)}
    assert changed == {("Deployment", "learner")}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_patches_of_an_overlay_name_objects_of_the_base(overlay: str) -> None:
    """Also where nothing can render them: a renamed object is noticed."""
    known = without_hash(as_written())
    folder = KUBERNETES / "overlays" / overlay
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization["resources"] == ["../../base"]
    for patch in kustomization.get("patches", []):
        if "path" in patch:
            written = yaml.safe_load((folder / patch["path"]).read_text())
            assert (written["kind"], written["metadata"]["name"]) in known
        else:
            assert (patch["target"]["kind"], patch["target"]["name"]) in known
    for generator in kustomization.get("configMapGenerator", []):
        assert ("ConfigMap", generator["name"]) in known
    for replicas in kustomization.get("replicas", []):
        assert {("StatefulSet", replicas["name"]), ("Deployment", replicas["name"])} & set(known)


# --- and compose.yaml ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The services of compose.yaml with the defaults of all variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "compose.yaml").read_text())
    services = yaml.safe_load(text)["services"]
    return {name.replace("_", "-"): service for name, service in services.items() if name != "keys"}


def test_base_and_compose_run_the_same_services_in_the_same_way(compose: dict[str, Any]) -> None:
    """Commands, images, memory and the room in /tmp agree; a replay of several also knows its number."""
    base = Manifests("base", as_written())
    assert set(compose) == EVERYBODY
    for name, container in base.containers.items():
        here, there = container.spec, compose[name]
        number = ["--number", "$(REPLAY_NUMBER)"] if name == "replay" else []
        assert here["command"] == [*there["command"], *number]
        assert here["image"] == f"{there['image']}:latest"
        assert here["resources"]["limits"]["memory"] == there["mem_limit"].replace("g", "Gi")
        size = container.mounts["/tmp"]["emptyDir"]["sizeLimit"].replace("Mi", "m")
        assert there["tmpfs"] == [f"/tmp:size={size}"]
    assert base.of("Deployment")["learner"]["spec"]["replicas"] == compose["learner"]["scale"]


def test_base_and_compose_have_the_same_environment_but_for_host_names(compose: dict[str, Any]) -> None:
    """A run is configured the same, wherever it is."""
    hosts = {"//param_server:": "//param-server:", "//replay:": "//replay-0.replay:"}
    for service in compose.values():
        environment = {}
        for key, value in service["environment"].items():
            environment[key] = "null" if value is None else str(value)
            for there, here in hosts.items():
                environment[key] = environment[key].replace(there, here)
        assert environment == Manifests("base", as_written()).environment

"""The manifests of deploy/kubernetes as objects, rendered or as they stand in their files."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
WITH_PODS = ("StatefulSet", "Deployment")

Object = dict[str, Any]


@functools.cache
def renderer() -> tuple[str, ...]:
    """The command that renders a folder on this machine; empty: it has none, and none can be had by pip."""
    if found := shutil.which("kustomize"):
        return found, "build"
    if found := shutil.which("kubectl"):
        about = subprocess.run([found, "version", "--client", "-o", "json"], capture_output=True, check=False)
        if b"kustomizeVersion" in about.stdout:  # kubectl of before 1.24 has an older one than we write for
            return found, "kustomize"
    return ()


def rendered(folder: Path) -> list[Object]:
    """What `kubectl apply -k folder` would send."""
    done = subprocess.run([*renderer(), str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"kustomize warns: {done.stderr}"
    return list(yaml.safe_load_all(done.stdout))


def as_written() -> list[Object]:
    """The base from its files: whole manifests, but for the config, which is a list of literals."""
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    objects: list[Object] = []
    for name in kustomization["resources"]:
        objects += yaml.safe_load_all((BASE / name).read_text())
    for generator in kustomization["configMapGenerator"]:
        data = dict(literal.split("=", 1) for literal in generator["literals"])
        metadata = {"name": generator["name"], "labels": generator["options"]["labels"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return objects


def without_hash(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """By kind and name, the generated config under the name that it has in the files."""
    plain = yaml.safe_load(re.sub(r"rookery-config-\w{10}", "rookery-config", yaml.safe_dump(objects)))
    return {(each["kind"], each["metadata"]["name"]): each for each in plain}


@dataclass(frozen=True)
class Container:
    """The one container of a workload's pods."""

    workload: Object

    @property
    def name(self) -> str:
        return str(self.workload["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.workload["spec"]["template"]["metadata"]["labels"])

    @property
    def pod(self) -> Object:
        return dict(self.workload["spec"]["template"]["spec"])

    @property
    def spec(self) -> Object:
        (only,) = self.pod["containers"]
        return dict(only)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.spec.get("ports", [])}

    @property
    def volumes(self) -> dict[str, Object]:
        claims = self.workload["spec"].get("volumeClaimTemplates", [])
        return {volume["name"]: volume for volume in self.pod["volumes"]} | {
            claim["metadata"]["name"]: {"claim": claim["spec"]} for claim in claims
        }

    @property
    def mounts(self) -> dict[str, Object]:
        """By path: the volume, and how it is mounted."""
        return {
            mount["mountPath"]: {**self.volumes[mount["name"]], "mount": mount}
            for mount in self.spec["volumeMounts"]
        }

    @property
    def keys(self) -> set[str]:
        """The files that it finds in /keys."""
        return {item["path"] for item in self.mounts["/keys"]["secret"]["items"]}


@dataclass(frozen=True)
class Manifests:
    """All objects of one deployment, and how they refer to one another."""

    name: str
    objects: list[Object]

    def of(self, kind: str) -> dict[str, Object]:
        return {each["metadata"]["name"]: each for each in self.objects if each["kind"] == kind}

    @property
    def containers(self) -> dict[str, Container]:
        return {
            each["metadata"]["name"]: Container(each) for each in self.objects if each["kind"] in WITH_PODS
        }

    @property
    def environment(self) -> dict[str, str]:
        (config,) = self.of("ConfigMap").values()
        return dict(config["data"])

    def selected(self, labels: dict[str, str]) -> set[str]:
        """The workloads whose pods have all of these labels."""
        return {name for name, one in self.containers.items() if labels.items() <= one.labels.items()}

    def service_ports(self, service: str) -> dict[str, int]:
        return {port["name"]: port["port"] for port in self.of("Service")[service]["spec"]["ports"]}

    def pod_names(self) -> Iterator[tuple[str, str]]:
        """(DNS name, service) of everything in a StatefulSet that can be addressed."""
        for name, workload in self.of("StatefulSet").items():
            service = workload["spec"]["serviceName"]
            if workload["spec"]["replicas"] == 1:
                yield service, service
            for number in range(workload["spec"]["replicas"]):
                yield f"{name}-{number}.{service}", service

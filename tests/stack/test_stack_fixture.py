"""Stacks of containers: beside each other, disturbed, scaled, and always removed."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
from small_stacks import ASK_WEB, IMAGE, check, compose_file, idle, never_healthy, service, web
from waiting import wait_for

from rookery.testing.container import Container
from rookery.testing.errors import CommandFailed, StackError, Unhealthy
from rookery.testing.stack import Stack

pytestmark = pytest.mark.stack

MakeStack = Callable[..., Stack]

HARDENED = {
    "read_only": True,
    "user": "10001:10001",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "restart": "unless-stopped",
}


def answer(client: Container) -> str | None:
    """What the service `web` says to a container that asks for it by name; None if it cannot be reached."""
    try:
        return client.exec(*ASK_WEB).strip()
    except CommandFailed:
        return None


def lives(stack: Stack) -> dict[str, tuple[str, str]]:
    """Each container with what changes if it is recreated or restarted."""
    return {one.name: (one.id, one.started_at) for one in stack.containers()}


# --- beside each other ------------------------------------------------------------------------------------


def test_two_stacks_of_one_file_do_not_meet(rookery_stack: MakeStack, tmp_path: Path) -> None:
    """Even if the file fixes every name and port that can be fixed."""
    fixed = web(container_name="the-web", ports=["127.0.0.1:18000:8000"], volumes=["data:/data"])
    names = {"volumes": {"data": {"name": "the-data"}}, "networks": {"default": {"name": "the-network"}}}
    file = compose_file(tmp_path, {"web": fixed, "client": idle()}, **names)
    stacks = {mark: rookery_stack([file], environment={"MARK": mark}) for mark in ("$first", "$second")}

    for mark, stack in stacks.items():
        assert answer(stack.container("client")) == mark
        host, port = stack.container("web").published(8000)
        with urllib.request.urlopen(f"http://{host}:{port}/mark", timeout=5) as page:
            assert page.read().decode().strip() == mark
    first, second = stacks.values()
    first.container("web").exec("touch", "/data/of-the-first")
    assert first.container("web").exec("ls /data") == "of-the-first\n"
    assert second.container("web").exec("ls /data") == ""
    assert not set(first.leftovers()) & set(second.leftovers())

    first.down()
    assert first.leftovers() == []
    assert answer(second.container("client")) == "$second"


def test_variables_profiles_and_several_files_are_those_of_compose(
    rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """A later file wins; variables are filled in; a service of a profile is there to be run, not started."""
    services = {
        "one": idle(environment={"GIVEN": "${GIVEN}"}),
        "tool": service("echo tool", profiles=["tools"]),
    }
    base = compose_file(tmp_path, services)
    (tmp_path / "more").mkdir()
    over = compose_file(tmp_path / "more", {"one": {"environment": {"ADDED": "b"}}})
    stack = rookery_stack([base, over], variables={"GIVEN": "a"}, environment={"NUMBER": 3})
    assert stack.container("one").exec("printenv GIVEN ADDED NUMBER").split() == ["a", "b", "3"]
    assert [one.name for one in stack.containers()] == ["one-1"]
    assert stack.run("tool") == "tool\n"


def test_wrong_names_are_told_with_the_right_ones(rookery_stack: MakeStack, tmp_path: Path) -> None:
    """Nobody should have to look them up."""
    file = compose_file(tmp_path, {"one": idle(), "two": idle()})
    with pytest.raises(StackError, match="no service 'won' to scale; there are one, two"):
        rookery_stack([file], scale={"won": 2})
    with pytest.raises(StackError, match=r"there is no compose file .*missing\.yaml"):
        rookery_stack([tmp_path / "missing.yaml"])
    stack = rookery_stack([file])
    with pytest.raises(StackError, match="no container one-2; there are: one-1, two-1"):
        stack.container("one", 2)
    with pytest.raises(StackError, match="one-1 does not publish 80/tcp"):
        stack.container("one").published(80)


# --- scale ------------------------------------------------------------------------------------------------


def test_scale_up_and_down_touches_nothing_else(rookery_stack: MakeStack, tmp_path: Path) -> None:
    """Same containers, started at the same moment; what a test has stopped or paused stays so."""
    well = check("true")
    services = {"hub": idle(), "actor": idle(depends_on=["hub"], healthcheck=well), "other": idle()}
    stack = rookery_stack([compose_file(tmp_path, services)], scale={"actor": 2})
    stack.container("actor", 2).stop()
    stack.container("hub").pause()
    before = lives(stack)
    assert sorted(before) == ["actor-1", "actor-2", "hub-1", "other-1"]

    stack.scale(actor=5)
    after = lives(stack)
    assert sorted(set(after) - set(before)) == ["actor-3", "actor-4", "actor-5"]
    assert {name: after[name] for name in before} == before
    states = {one.name: (one.status, one.health) for one in stack.containers("actor") if one.number != 2}
    assert set(states.values()) == {("running", "healthy")}
    assert stack.container("actor", 2).status == "exited"
    assert stack.container("hub").status == "paused"

    stack.scale(actor=2)
    assert lives(stack) == before


# --- disturbances -----------------------------------------------------------------------------------------


def test_killed_container_is_restarted_by_its_policy(rookery_stack: MakeStack, tmp_path: Path) -> None:
    """Also with all capabilities dropped, another user and a root file system that cannot be written."""
    file = compose_file(tmp_path, {"one": idle(**HARDENED, healthcheck=check("true"))})
    container = rookery_stack([file]).container("one")
    assert container.restarts == 0
    for times in (1, 2):
        container.kill()
        container.wait_healthy()
        assert container.restarts == times
        assert container.logs().count("started\n") == times + 1


def test_killed_container_without_a_policy_stays_dead_with_the_code_of_the_signal(
    rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """It was SIGKILL, not an orderly end; and waiting for its health ends at once, with the reason."""
    container = rookery_stack([compose_file(tmp_path, {"one": idle()})]).container("one")
    container.kill()
    assert (container.status, container.look()["State"]["ExitCode"]) == ("exited", 137)
    with pytest.raises(Unhealthy, match="one-1: exited, exit code 137"):
        container.wait_healthy(deadline_s=600)
    container.start()
    container.wait_healthy()


def test_kill_without_an_init_process_is_refused(rookery_stack: MakeStack, tmp_path: Path) -> None:
    """The first process of a container cannot be killed from inside; better said than waited for."""
    file = compose_file(tmp_path, {"one": idle() | {"init": False}})
    with pytest.raises(StackError, match="needs `init: true` for the service one"):
        rookery_stack([file]).container("one").kill()


def test_stopped_container_stays_stopped_until_it_is_started(
    rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """A stop is a decision; the restart policy respects it."""
    file = compose_file(tmp_path, {"one": idle(restart="unless-stopped")})
    container = rookery_stack([file]).container("one")
    wait_for(lambda: "started" in container.logs(), "its init can take signals")
    container.stop()
    assert (container.status, container.restarts) == ("exited", 0)
    with pytest.raises(Unhealthy, match="one-1: exited"):
        container.wait_healthy(deadline_s=600)
    container.start()
    container.wait_healthy()


def test_paused_container_is_silent_and_then_goes_on(rookery_stack: MakeStack, tmp_path: Path) -> None:
    """It does not die of it, and it is paused at least as long as asked."""
    file = compose_file(tmp_path, {"web": web(environment={"MARK": "here"}), "client": idle()})
    stack = rookery_stack([file])
    served, client = stack.container("web"), stack.container("client")
    assert answer(client) == "here"
    began = time.monotonic()
    with served.paused(at_least_s=4.0):
        assert served.status == "paused"
        assert answer(client) is None
    assert time.monotonic() - began >= 4.0
    assert answer(client) == "here"
    assert served.restarts == 0


def test_partitioned_container_is_lost_and_found_again_by_name(
    rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """Under all its names and on all its networks, with its process never interrupted."""
    both = {"default": {"aliases": ["web.example"]}, "back": None}
    services = {
        "web": web(environment={"MARK": "here"}, networks=both),
        "client": idle(),
        "behind": idle(networks=["back"]),
    }
    stack = rookery_stack([compose_file(tmp_path, services, networks={"back": None})])
    served, clients = stack.container("web"), [stack.container("client"), stack.container("behind")]
    before = lives(stack)
    assert [answer(client) for client in clients] == ["here", "here"]

    with served.partitioned():
        assert [answer(client) for client in clients] == [None, None]
        served.exec("python -c \"import urllib.request as u; u.urlopen('http://localhost:8000')\"")
    assert [answer(client) for client in clients] == ["here", "here"]
    clients[0].exec("getent hosts web.example")
    assert lives(stack) == before


def test_partition_heals_when_its_block_fails_and_ends_with_the_stack(
    rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """The failure that is seen is the test's own."""
    file = compose_file(tmp_path, {"web": web(environment={"MARK": "here"}), "client": idle()})
    stack = rookery_stack([file])
    served, client = stack.container("web"), stack.container("client")
    with pytest.raises(ValueError, match="inside"), served.partitioned(), client.paused():
        raise ValueError("inside")
    assert answer(client) == "here"
    with served.partitioned(), client.paused():
        stack.down()
    assert stack.leftovers() == []


# --- asking -----------------------------------------------------------------------------------------------


def test_exec_and_run_give_output_or_an_error_with_what_was_written(
    rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """What goes wrong in a container can be read in the test's report."""
    stack = rookery_stack([compose_file(tmp_path, {"one": idle()})])
    before = lives(stack)
    container = stack.container("one")
    speak = "echo to the output; echo to the errors >&2; exit $0"
    assert (
        container.exec("sh", "-c", speak, "0")
        == stack.run("one", "sh", "-c", speak, "0")
        == "to the output\n"
    )
    for ask in (container.exec, lambda *command: stack.run("one", *command)):
        with pytest.raises(CommandFailed, match=r"(?s)ended with 3:.*to the output.*to the errors") as failed:
            ask("sh", "-c", speak, "3")
        assert failed.value.code == 3
    with pytest.raises(StackError, match="no-such-program"):
        container.exec("no-such-program --help")
    assert lives(stack) == before
    assert len(stack.leftovers()) == 2  # the container and the network: what `run` made is gone


def test_logs_since_a_moment_leave_out_what_was_before(rookery_stack: MakeStack, tmp_path: Path) -> None:
    """So that a test can look at what it caused."""
    file = compose_file(tmp_path, {"one": idle(restart="always")})
    container = rookery_stack([file]).container("one")
    wait_for(lambda: "started" in container.logs(), "its first line")
    moment = time.time()
    assert container.logs(since=moment) == ""
    container.kill()
    wait_for(lambda: container.logs(since=moment) == "started\n", "its line after the restart")
    assert container.logs() == "started\n" * 2
    assert container.logs(tail=1) == "started\n"


# --- not healthy ------------------------------------------------------------------------------------------


def test_stack_that_does_not_become_healthy_says_who_and_why(
    rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """With the words of the health check and the end of the log; the healthy ones are not mentioned."""
    file = compose_file(tmp_path, {"replay": never_healthy(), "fine": idle()})
    with pytest.raises(Unhealthy) as failed:
        rookery_stack([file], deadline_s=3)
    said = str(failed.value)
    assert "1 of 2 containers are not healthy" in said
    assert "- replay-1: running, health starting" in said or "- replay-1: running, health unhealthy" in said
    assert "(exit code 1) said: waiting for the first actor" in said
    assert "its log ends with:\n    I have no specs" in said
    assert "fine-1" not in said


@pytest.mark.parametrize("ends", [False, True])
def test_stack_whose_dependency_is_not_healthy_says_who_and_why(
    rookery_stack: MakeStack, tmp_path: Path, ends: bool
) -> None:
    """Also where it is Compose that waits, until the deadline or until it sees that there is no hope."""
    first = service("echo no keys; exit 3", healthcheck=check("true")) if ends else never_healthy()
    last = idle(depends_on={"first": {"condition": "service_healthy"}})
    file = compose_file(tmp_path, {"first": first, "last": last})
    with pytest.raises(Unhealthy) as failed:
        rookery_stack([file], deadline_s=5)
    said = str(failed.value)
    assert "docker compose up" in said
    assert ("- first-1: exited, exit code 3" if ends else "said: waiting for the first actor") in said
    assert ("    no keys" if ends else "    I have no specs") in said
    assert "- last-1: created" in said


def test_container_that_ends_is_healthy_only_if_it_ended_well(
    rookery_stack: MakeStack, tmp_path: Path
) -> None:
    """Some make keys and are done; others fail, and nobody waits until the deadline to say so."""
    well = {
        "keys": service("echo made"),
        "one": idle(depends_on={"keys": {"condition": "service_completed_successfully"}}),
    }
    stack = rookery_stack([compose_file(tmp_path, well)])
    assert stack.container("keys").status == "exited"
    file = compose_file(tmp_path, {"keys": service("echo no room; exit 4"), "one": never_healthy()})
    with pytest.raises(Unhealthy, match=r"(?s)- keys-1: exited, exit code 4.*    no room"):
        rookery_stack([file], deadline_s=600)


# --- gone -------------------------------------------------------------------------------------------------


def test_down_leaves_nothing_or_on_request_the_data(
    rookery_stack: MakeStack, tmp_path: Path, engine: docker.DockerClient
) -> None:
    """Volumes without a name, images built for the stack and one-off containers included."""
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nVOLUME /scratch\n")
    built = idle(volumes=["data:/data"]) | {"build": "."}
    del built["image"]
    stack = rookery_stack([compose_file(tmp_path, {"one": built}, volumes={"data": None})])
    volumes = {mount["Name"] for mount in stack.container("one").look()["Mounts"]}
    assert len(volumes) == 2
    stack.container("one").exec("touch /data/kept")
    kinds = [thing.split()[0] for thing in stack.leftovers()]
    assert sorted(kinds) == ["container", "image", "network", "volume"]

    stack.down(volumes=False)
    assert sorted(thing.split()[0] for thing in stack.leftovers()) == ["image", "volume"]
    stack.up()
    assert stack.container("one").exec("ls /data") == "kept\n"
    stack.down()
    assert stack.leftovers() == []
    assert not volumes & {volume.name for volume in engine.volumes.list()}


def test_stack_as_a_context_manager_is_removed_in_any_case(tmp_path: Path) -> None:
    """After its block, after a failure in it, and if it never became healthy."""
    with Stack([compose_file(tmp_path, {"one": idle()})]) as stack:
        assert stack.container("one").status == "running"
    assert stack.leftovers() == []

    failing = Stack([compose_file(tmp_path, {"one": service("exit 1", healthcheck=check("true"))})])
    with pytest.raises(Unhealthy), failing:
        raise AssertionError("never reached")
    assert failing.leftovers() == []

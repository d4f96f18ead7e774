"""A deployment's folder, its certificates and its gates, without a SuperLink."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import ssl
import stat
import subprocess
import sys
import tomllib
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from fedloom import certificates
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.simulations import admission
from fedloom.simulations.deploy_init import Plan, init
from fedloom.simulations.deploy_up import up
from fedloom.simulations.deployed import check_deployment
from fedloom.simulations.deployment import Coordinator, Deployment, Node
from fedloom.simulations.superlink import write_app

pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Three nodes, and a coordinator of two names."""
    folder = tmp_path_factory.mktemp("deploy") / "d"
    init(folder, Plan(nodes=3, hosts=["lab.example", "10.0.0.7"], port=8443))
    return folder


def modes(folder: Path) -> dict[str, int]:
    return {
        str(file.relative_to(folder)): stat.S_IMODE(file.stat().st_mode)
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_only_the_owner_reads_keys_and_each_key_lies_once(made):
    secret = {name for name, mode in modes(made).items() if mode == 0o600}
    assert secret == {"ca/ca.key", "coordinator/server.key", *(f"nodes/{n}/key" for n in "123")}
    texts = [(made / name).read_text() for name in modes(made)]
    assert sum("PRIVATE KEY" in text for text in texts) == len(secret)
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o700 for f in made.rglob("*") if f.is_dir())


def test_server_certificate_holds_for_its_names_and_no_others(made):
    ca, server = ((made / "coordinator" / n).read_bytes() for n in ("ca.crt", "server.crt"))
    for host in ("lab.example", "10.0.0.7", "localhost", "127.0.0.1"):
        last = certificates.check_server(server, ca, host)
    assert timedelta(days=364) < last - datetime.now(UTC) < timedelta(days=366)
    with pytest.raises(Refusal, match=r"does not name evil.example: expected one of lab.example"):
        certificates.check_server(server, ca, "evil.example")
    with pytest.raises(Refusal, match="ended on"):
        certificates.check_server(server, ca, "localhost", now=last + timedelta(days=1))
    other = certificates.authority(2)
    with pytest.raises(Refusal, match="of another authority"):
        certificates.check_server(server, other.certificate, "localhost")
    with pytest.raises(Refusal, match="expected a DNS name or an IP address"):
        certificates.server(other, ["https://lab:8000"], 2)


def test_openssl_trusts_the_chain_even_when_strict(made, tmp_path):
    """A handshake in memory, as Python 3.13 checks it by default."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made / "coordinator/server.crt", made / "coordinator/server.key")
    other = tmp_path / "other.crt"
    other.write_bytes(certificates.authority(2).certificate)

    def handshake(authority: Path, host: str) -> None:
        client = ssl.create_default_context(cafile=str(authority))
        client.verify_flags |= ssl.VERIFY_X509_STRICT
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            client.wrap_bio(to_client, to_server, server_hostname=host),
            server.wrap_bio(to_server, to_client, server_side=True),
        ]
        for _ in range(4):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue

    handshake(made / "ca/ca.crt", "lab.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made / "ca/ca.crt", "other.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(other, "lab.example")


def test_flower_takes_the_keys(made):
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    for number in (1, 2, 3):
        key = load_ssh_private_key((made / f"nodes/{number}/key").read_bytes(), None)
        public = try_load_public_key(made / f"coordinator/nodes/{number}.pub")
        assert public_key_to_bytes(key.public_key()) == public
        assert (made / f"nodes/{number}/key.pub").read_bytes() == (
            made / f"coordinator/nodes/{number}.pub"
        ).read_bytes()


def test_init_overwrites_nothing(made, tmp_path):
    before = {name: (made / name).read_bytes() for name in modes(made)}
    with pytest.raises(Refusal, match="is not empty: init overwrites nothing"):
        init(made, Plan(nodes=1, hosts=[]))
    assert {name: (made / name).read_bytes() for name in modes(made)} == before
    (tmp_path / "empty").mkdir()
    init(tmp_path / "empty", Plan(nodes=1, hosts=[]))
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]  # nor leaves anything half made
    with pytest.raises(Refusal, match="expected a DNS name"):
        init(tmp_path / "bad", Plan(nodes=1, hosts=["a b"]))
    assert not list(tmp_path.glob("*bad*"))
    for wrong in ({"nodes": 0}, {"days": 0}, {"port": 70000}, {"node_port": 65535}):
        with pytest.raises(Refusal):
            Plan(**{"nodes": 2, "hosts": [], **wrong})


def test_each_machine_is_told_what_it_needs(made):
    whole = Deployment.read(made)
    coordinator = whole.required()
    assert (coordinator.address, coordinator.bind) == ("lab.example:8443", "0.0.0.0")
    assert (coordinator.local, coordinator.code) == ("127.0.0.1:8443", "refuse")
    assert [(n.partition, n.partitions, n.port) for n in whole.nodes.values()] == [
        (0, 3, 9101), (1, 3, 9102), (2, 3, 9103)
    ]  # fmt: skip
    alone = Deployment.read(made / "nodes/2")
    assert (alone.coordinator, list(alone.nodes)) == (None, [2])
    assert Deployment.read(made / "coordinator").required() == coordinator
    assert whole.parts(node=2) == [whole.nodes[2]]
    assert whole.parts(coordinator_only=True) == [coordinator]
    for asked in ({"node": 4}, {"coordinator_only": True}):
        with pytest.raises(Refusal):
            alone.parts(**asked)
    with pytest.raises(Refusal, match="is no deployment"):
        Deployment.read(made / "systemd")
    with pytest.raises(Refusal, match=r"has 3 nodes; --set clients.count=3"):
        check_deployment(RunConfig(), whole)


def test_settings_are_held_to_what_is_known(made, tmp_path):
    text = (made / "nodes/1/node.toml").read_text()
    for change, said in (
        (("code =", "kode ="), "unknown key kode .did you mean code"),
        (('"refuse"', '"maybe"'), "expected refuse or allow"),
        (("port = 9101", 'port = "x"'), "expected int"),
        (("partition = 0", "partition = 9"), "expected 0 to 2"),
        (('data = ""', 'data = "absent.jsonl"'), "is not there"),
        (('encoder = ""', 'encoder = "lm:path:absent"'), "encoder = lm:path:absent, but .*absent"),
        (('encoder = ""', "encoder = 'say \"x\"'"), "without quotes"),
        (("revision = 1", "revision = 0"), "revision = 0, expected 1 or above"),
        (("superlink =", "#"), "lacks a key"),
        (("superlink", "= ="), "cannot be read"),
    ):
        (tmp_path / "node.toml").write_text(text.replace(*change))
        with pytest.raises(Refusal, match=said):
            Node.read(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "node.toml").write_text(text.replace('data = ""', 'data = "rows.jsonl"'))
    assert Node.read(tmp_path).config() == (
        f'partition-id=0 num-partitions=3 data="{tmp_path / "rows.jsonl"}"'
    )
    for named, told in (
        ("relu:9:path:rows.jsonl", f"relu:9:path:{tmp_path / 'rows.jsonl'}"),
        ("lm:embedded:smollm2-135m", "lm:embedded:smollm2-135m"),
    ):
        own = text.replace('encoder = ""', f'encoder = "{named}"')
        (tmp_path / "node.toml").write_text(own)
        config = Node.read(tmp_path).config()
        assert config == f'partition-id=0 num-partitions=3 encoder="{told}"'
    (tmp_path / "node.toml").write_text(text.replace("revision = 1", "revision = 2"))
    assert Node.read(tmp_path).config() == "partition-id=0 num-partitions=3 revision=2"
    broken = (made / "coordinator/coordinator.toml").read_text().replace('"here"', '"there"')
    (tmp_path / "coordinator.toml").write_text(broken)
    with pytest.raises(Refusal, match="expected here or anywhere"):
        Coordinator.read(tmp_path)


def test_readme_names_flowers_own_commands(made):
    text = (made / "README.txt").read_text()
    for words in ("flower-superlink", "--enable-supernode-auth", "flower-supernode", "3.pub"):
        assert words in text
    assert str(made) in text
    assert "{" not in text
    assert "." + made.name + "-" not in text  # the folder it was made in


def test_compose_file_of_the_folder(made, tmp_path):
    tree = yaml.safe_load((made / "compose.yaml").read_text())
    services = tree["services"]
    assert set(services) == {"coordinator", "node-1", "node-2", "node-3"}
    for name, service in services.items():
        assert service["user"] == "${FEDLOOM_UID:-10001}:${FEDLOOM_GID:-10001}"
        assert service["healthcheck"]["test"] == ["CMD", "fedloom", "deploy", "health", "/deploy"]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        folder = "./coordinator" if name == "coordinator" else f"./nodes/{name[5:]}"
        assert f"{folder}:/deploy" in service["volumes"]
        volumes = {v.split(":")[0] for v in service["volumes"]} - {folder}
        assert volumes <= tree["volumes"].keys()
        assert "privileged" not in service
    assert services["coordinator"]["ports"] == ["8443:8443"]
    assert services["coordinator"]["networks"]["default"]["aliases"] == ["lab.example"]
    assert services["node-2"]["depends_on"]["coordinator"]["condition"] == "service_healthy"
    init(tmp_path / "here", Plan(nodes=1, hosts=[]))
    alone = yaml.safe_load((tmp_path / "here/compose.yaml").read_text())["services"]
    assert [s.get("network_mode") for s in alone.values()] == ["host", "host"]


def fab(**files: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", ".").replace("-", "/"), text)
    return data.getvalue()


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_what_fedloom_submits_is_let_in(tmp_path):
    from flwr.cli.build import build_fab_from_disk

    admission.check_app(build_fab_from_disk(write_app(tmp_path, RunConfig())))
    admission.check_app(build_fab_from_disk(Path(__file__).parents[2]))  # `flwr run .`


def test_apps_with_code_are_refused_before_they_are_unpacked(tmp_path):
    good = (write_app(tmp_path, RunConfig()) / "pyproject.toml").read_text()
    admission.check_app(fab(pyproject__toml=good))
    for files, said in (
        ({"pyproject__toml": good, "evil__py": "1"}, r"brings evil\.py: this machine runs only"),
        ({"pyproject__toml": good, "pkg-__init____py": "1"}, "brings pkg"),
        ({"pyproject__toml": good, "sub-evil__toml": "1"}, "brings sub/evil.toml"),
        ({"pyproject__toml": good, "____-evil__toml": "1"}, "brings"),
        ({"pyproject__toml": good, "lib__so": "1"}, r"brings lib\.so"),
        ({"pyproject__toml": good.replace("client_app:app", "evil:app")}, "names clientapp="),
        ({"pyproject__toml": good.replace("clientapp", "agentapp")}, "names agentapp="),
        ({"pyproject__toml": good + "#" * 2_000_000}, "unpacks to over"),
        ({"pyproject__toml": "= ="}, "cannot be read"),
        ({"other__toml": good}, "cannot be read"),
    ):
        with pytest.raises(Refusal, match=said):
            admission.check_app(fab(**files))
    with pytest.raises(Refusal, match=r"cannot be read .BadZipFile"):
        admission.check_app(b"no zip")


def test_gates_stand_where_flower_calls(tmp_path):
    """Each of Flower's task commands has a gate; the one that runs apps still unpacks there."""
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    gates = admission.write_gates(tmp_path)
    assert {p.name for p in gates.iterdir()} == set(TASK_TYPE_TO_COMMAND.values())
    assert all(os.access(p, os.X_OK) for p in gates.iterdir())
    done = subprocess.run([gates / "flwr-agentapp"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("fedloom: flwr-agentapp is refused")


@pytest.mark.parametrize("command", admission.RUNNERS)
def test_flowers_unpacking_is_guarded(command, monkeypatch):
    import importlib

    module = importlib.import_module(admission.RUNNERS[command])
    monkeypatch.setattr(module, "install_from_fab", module.install_from_fab)
    admission._place_gate(command)
    with pytest.raises(Refusal, match="cannot be read"):
        module.install_from_fab(b"no zip", skip_prompt=True)


def status_for(path: str, client: object) -> int:
    sent = []

    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "client": client}
    asyncio.run(admission.FromHere(app)(scope, None, send))
    return sent[0]["status"]


def test_orders_are_taken_from_this_machine_alone():
    for path in ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/x", "/docs"):
        assert status_for(path, ("127.0.0.1", 1)) == 200
        assert status_for(path, ("::1", 1)) == 200
        for stranger in (("10.0.0.9", 1), ("2001:db8::1", 1), None, ("name", 1)):
            assert status_for(path, stranger) == 403
    for path in ("/v1/fleet/pull-messages", "/health"):
        assert status_for(path, ("10.0.0.9", 1)) == 200


def test_superlinks_routes_are_behind_the_gate(monkeypatch):
    """Flower's own app, with the gate as the first of its layers."""
    from flwr.superlink import extensions, main

    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    admission._place_gate("flower-superlink")
    app = main.create_app()
    assert app.user_middleware[0].cls is admission.FromHere
    assert "/v1/control/start-run" in app.openapi()["paths"]
    assert any(path.startswith("/v1/fleet/") for path in app.openapi()["paths"])


def test_key_that_others_may_read_is_not_used(made, tmp_path):
    node = tmp_path / "node"
    shutil.copytree(made / "nodes/1", node)
    said: list[str] = []
    (node / "key").chmod(0o640)
    with pytest.raises(Refusal, match=r"can be read by others than its owner: chmod 600"):
        up(Deployment.read(node).parts(), said.append)
    (node / "key").unlink()
    with pytest.raises(Refusal, match="key is missing"):
        up(Deployment.read(node).parts(), said.append)
    assert said == []
    assert not (node / "home").exists()


def test_coordinator_whose_certificate_is_of_another_name_does_not_start(made, tmp_path):
    copy = tmp_path / "coordinator"
    shutil.copytree(made / "coordinator", copy)
    file = copy / "coordinator.toml"
    file.write_text(file.read_text().replace("lab.example:8443", "moved.example:8443"))
    with pytest.raises(Refusal, match=r"does not name moved.example"):
        up(Deployment.read(copy).parts(), str)


def test_units_run_what_exists(made):
    for unit in (made / "systemd").iterdir():
        text = unit.read_text()
        assert "User=fedloom" in text
        assert "ExecStart=/opt/fedloom/bin/fedloom deploy up /etc/fedloom/" in text


def test_first_words_of_a_user(tmp_path):
    command = [sys.executable, "-m", "fedloom.simulations", "deploy", "init", str(tmp_path / "d")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fedloom run RECIPE --on" in done.stdout
    assert tomllib.loads((tmp_path / "d/nodes/2/node.toml").read_text())["partition"] == 1
    again = subprocess.run(command, capture_output=True, text=True)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)

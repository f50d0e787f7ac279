"""docker-compose.yaml and the Dockerfile, held to the rest: what they run, say, open, keep and hide exists and is as meant."""

import ast
import fnmatch
import importlib.util
import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from cryptography.fernet import Fernet

from tidemark import __main__ as cli
from tidemark import airflow, local, metrics, notifier, session, speed
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

ROOT = Path(__file__).parent.parent
COMPOSE, DOCKERFILE = (ROOT / "docker-compose.yaml").read_text(), (ROOT / "Dockerfile").read_text()
EXAMPLE = (ROOT / ".env.example").read_text()
SECRETS = dict.fromkeys(re.findall(r"^(\w+)=$", EXAMPLE, re.MULTILINE), "s3cr3t-of-the-test")
BIN = Path(sys.executable).parent


def read(env: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What podman-compose makes of the file; a dry run needs no podman."""
    command = [BIN / "podman-compose", "--dry-run", "-f", ROOT / "docker-compose.yaml", "--profile", "spark", "config"]
    # `.env` is read from the folder of the file: what a developer has there must not answer for what is missing.
    clean = {"PATH": os.environ["PATH"]} | dict.fromkeys(SECRETS, "") | env
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found = read(SECRETS)
    assert (found.returncode, found.stderr) == (0, "")
    return yaml.safe_load(found.stdout)


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return compose["services"]


def image_environment() -> dict[str, str]:
    """What the last stage of the Dockerfile sets."""
    last = DOCKERFILE.rsplit("\nFROM ", 1)[1]
    [block] = re.findall(r"^ENV ((?:.*\\\n)*.*)$", last, re.MULTILINE)
    return dict(word.split("=", 1) for word in shlex.split(block.replace("\\\n", " ")))


def environment(service: dict[str, Any]) -> dict[str, str]:
    """What a process of a service finds: the image's and the service's own."""
    own = {n: str(v) for n, v in (service.get("environment") or {}).items()}
    return (image_environment() if "build" in service else {}) | own


def ours(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services.items() if "build" in service}


def command_lines(service: dict[str, Any]) -> list[list[str]]:
    """Every command of a service and of its health check, a shell's script line by line."""
    health = service["healthcheck"]["test"] if "healthcheck" in service else []
    found = [service["command"]] if "command" in service else []
    found += [health[1:]] if health[:1] == ["CMD"] else [["bash", "-c", health[1]]] if health else []
    lines = []
    for words in found:
        if words[0] != "bash":
            lines.append(words)
            continue
        for line in words[-1].replace("$$", "$").splitlines():
            for part in re.split(r" \| | > ", line):
                lines.append(shlex.split(part))
    return lines


# ------------------------------------------------------------------------------------------------------------- commands


def test_commands_of_tidemark_are_taken(services: dict[str, dict[str, Any]]) -> None:
    lines = [line for service in services.values() for line in command_lines(service) if line[0] == "tidemark"]
    for line in lines:
        command: Any = typer.main.get_command(cli.app)
        words = line
        while hasattr(command, "commands"):
            context = command.make_context(words[0], words[1:])
            _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            words = [command.name, *rest]
        command.make_context(words[0], words[1:])
    alarms = ["tidemark", "speed", "--stream", "alarms"]
    assert sorted(lines) == [["tidemark", "notify"], ["tidemark", "speed"], alarms, ["tidemark", "topics", "apply"]]


PARSE = """
import json, sys
from airflow.cli.cli_parser import get_parser
for words in json.loads(sys.argv[1]):
    said = get_parser().parse_args(words)
    print(said.subcommand, getattr(said, "job_type", ""))
"""


def test_commands_of_airflow_are_taken(services: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    lines = [line[1:] for service in services.values() for line in command_lines(service) if line[0] == "airflow"]
    home = {"AIRFLOW_HOME": str(tmp_path), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    argv = [sys.executable, "-c", PARSE, json.dumps(lines)]
    done = subprocess.run(argv, env=os.environ | home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {" ".join(line[:2]) for line in lines if line[0] in ("db", "pools", "jobs")} == {
        "db migrate",
        "pools set",
        "jobs check",
    }
    assert {line[0] for line in lines} == {"db", "pools", "jobs", "api-server", "scheduler", "dag-processor", "triggerer"}


def test_every_other_command_exists(services: dict[str, dict[str, Any]]) -> None:
    [core] = local.pyspark_jars().glob("spark-core_*.jar")
    classes = set(zipfile.ZipFile(core).namelist())
    rest = [line for s in ours(services).values() for line in command_lines(s) if line[0] not in ("tidemark", "airflow")]
    for line in rest:
        if line[0] == "spark-class":
            assert (BIN / "spark-class").exists()
            assert f"{line[1].replace('.', '/')}.class" in classes
        elif line[0] == "python":
            assert line[1] == "-c"
            ast.parse(line[2])
        else:
            assert line[0] in ("umask", "find", "grep") or line == ["$AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"], line


def test_every_stream_is_a_service_that_drains_in_time_and_shows_its_metrics(services: dict[str, dict[str, Any]]) -> None:
    found = {}
    for service in services.values():
        if service.get("command", [])[:2] == ["tidemark", "speed"]:
            found[service["command"][-1] if "--stream" in service["command"] else "main"] = service
    assert sorted(found) == sorted(CATALOG.streams)
    drain = inspect.signature(speed.drain).parameters["seconds"].default
    end = inspect.signature(speed.Stream.end).parameters["seconds"].default
    for stream, service in found.items():
        said = environment(service)
        settings = Settings(_env_file=None, **{n[9:].lower(): v for n, v in said.items() if n.startswith("TIDEMARK_")})
        at = metrics.port(settings, stream, CATALOG.streams)
        assert service["ports"] == [f"127.0.0.1:{at}:{at}"] and settings.metrics_host == "0.0.0.0"
        assert service["restart"] == "unless-stopped" and settings.stream_backend == "service"
        assert seconds(service["stop_grace_period"]) >= drain + end
        [beat] = re.findall(r'find "\$(\w+)/([^"]+)" -mmin -1', service["healthcheck"]["test"][1])
        assert Path(said[beat[0]]) / beat[1] == settings.state / stream / "heartbeat.json"


def seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def test_every_service_that_stays_has_a_health_check_and_starts_after_what_it_needs(
    services: dict[str, dict[str, Any]],
) -> None:
    once = {name for name, service in services.items() if service["restart"] == "no"}
    assert once == {"topics", "init"}
    assert {name for name, service in services.items() if "healthcheck" not in service} == once
    needs = {name: service.get("depends_on", {}) for name, service in services.items()}
    for name, needed in needs.items():
        for other, how in needed.items():
            wanted = "service_completed_successfully" if other in once else "service_healthy"
            assert how["condition"] == wanted, f"{name} needs {other}"
    assert {name: sorted(needed) for name, needed in needs.items() if needed} == {
        "topics": ["broker"],
        "stream": ["broker", "topics"],
        "stream-alarms": ["broker", "topics"],
        "notify": ["broker", "init", "topics"],
        "init": ["postgres"],
        **{name: ["init"] for name in ("api-server", "scheduler", "dag-processor", "triggerer")},
        "spark-worker": ["spark-master"],
    }


# ------------------------------------------------------------------------------------------------------------ variables


def test_every_variable_of_tidemark_is_a_setting_that_it_takes(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        said = {n[len("TIDEMARK_") :].lower(): v for n, v in environment(service).items() if n.startswith("TIDEMARK_")}
        assert said.keys() <= Settings.model_fields.keys(), name
        Settings(_env_file=None, **said)


def test_every_variable_of_airflow_is_in_its_configuration(services: dict[str, dict[str, Any]]) -> None:
    spec = importlib.util.find_spec("airflow")  # not imported: that would make a home and a database
    assert spec and spec.submodule_search_locations
    known = yaml.safe_load((Path(spec.submodule_search_locations[0]) / "config_templates" / "config.yml").read_text())
    options = {f"AIRFLOW__{s.upper()}__{o.upper()}" for s, section in known.items() for o in section["options"]}
    said = {n for service in services.values() for n in environment(service) if n.startswith("AIRFLOW__")}
    assert said - options == set() and len(said) > 10


def test_no_variable_is_of_nobody(services: dict[str, dict[str, Any]]) -> None:
    known = {"broker": r"KAFKA_\w+", "postgres": r"(POSTGRES_(USER|DB|PASSWORD)|PGDATA)", "spark-worker": r"SPARK_WORKER_OPTS"}
    known |= {"init": r"AIRFLOW_(ADMIN|VIEWER)_PASSWORD", "spark-master": r"SPARK_MASTER_OPTS"}
    for name, service in services.items():
        own = service.get("environment") or {}
        left = [n for n in own if not re.fullmatch(r"TIDEMARK_\w+|AIRFLOW__\w+|AIRFLOW_CONN_SPARK_DEFAULT", n)]
        assert [n for n in left if not re.fullmatch(known.get(name, "none"), n)] == [], name


def test_airflow_s_services_are_told_the_same(services: dict[str, dict[str, Any]]) -> None:
    names = ("api-server", "scheduler", "dag-processor", "triggerer")
    assert all(services[name]["environment"] == services["scheduler"]["environment"] for name in names)
    said = services["scheduler"]["environment"]
    assert said.items() <= services["init"]["environment"].items()
    assert said["TIDEMARK_AIRFLOW_DATABASE"] == said["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]  # for maintenance's own commands


PLACES = (
    "DAGS_FOLDER PLUGINS_FOLDER EXECUTION_API_SERVER_URL SIMPLE_AUTH_MANAGER_PASSWORDS_FILE SQL_ALCHEMY_CONN HOST PORT BASE_URL"
)
KEYS = "FERNET_KEY SECRET_KEY JWT_SECRET"


def test_airflow_is_told_what_it_is_told_on_one_machine(services: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    def told(said: dict[str, str]) -> dict[str, str]:
        return {
            n: v for n, v in said.items() if n.startswith("AIRFLOW__") and n.split("__")[2] not in (PLACES + " " + KEYS).split()
        }

    on_one = told(airflow.environment(Settings(_env_file=None, home=tmp_path)))
    on_one.pop("AIRFLOW__USAGE_DATA_COLLECTION__ENABLED", None)  # no option of this Airflow
    here = told(environment(services["scheduler"]))
    assert here.pop("AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK") == "True"  # asked by the container's health check
    assert here == on_one


def test_pools_are_those_of_one_machine(services: dict[str, dict[str, Any]]) -> None:
    lines = [line[3:] for line in command_lines(services["init"]) if line[:3] == ["airflow", "pools", "set"]]
    assert {words[1]: (int(words[2]), words[3]) for words in lines} == airflow.POOLS
    assert {words[0] for words in lines} == {"--include-deferred"}


def test_airflow_runs_spark_where_it_is_told(services: dict[str, dict[str, Any]]) -> None:
    cluster = yaml.safe_load(read(SECRETS | {"TIDEMARK_MASTER": "spark://spark-master:7077"}).stdout)["services"]
    for found, master in ((services, "local[2]"), (cluster, "spark://spark-master:7077")):
        said = found["scheduler"]["environment"]
        assert json.loads(said["AIRFLOW_CONN_SPARK_DEFAULT"])["host"] == said["TIDEMARK_MASTER"] == master
        assert "TIDEMARK_MASTER" not in found["stream"]["environment"]  # it keeps its own cores
        settings = Settings(_env_file=None, **{n[9:].lower(): v for n, v in said.items() if n.startswith("TIDEMARK_")})
        assert session.cluster(settings).get("spark.driver.host") == (None if master == "local[2]" else "scheduler")
    said, worker, master = services["scheduler"]["environment"], services["spark-worker"], services["spark-master"]
    options = dict(zip(worker["command"][2:-1:2], worker["command"][3::2], strict=True))
    assert (options["--cores"], options["--memory"]) == (said["TIDEMARK_CLUSTER_CORES"], said["TIDEMARK_DRIVER_MEMORY"])
    where = dict(zip(master["command"][2::2], master["command"][3::2], strict=True))
    assert worker["command"][-1] == f"spark://{where['--host']}:{where['--port']}" == "spark://spark-master:7077"
    assert {tuple(s["profiles"]) for s in (worker, master)} == {("spark",)}


def test_broker_is_set_as_the_one_of_this_machine(services: dict[str, dict[str, Any]]) -> None:
    said = {n: str(v) for n, v in services["broker"]["environment"].items()}
    properties = local.server_properties(Settings(_env_file=None), "127.0.0.1", 19092, Path("/data"))
    wanted = dict(line.split("=", 1) for line in properties.splitlines())
    places = {"controller.quorum.voters", "listeners", "advertised.listeners", "listener.security.protocol.map", "log.dirs"}
    found = {name: said.get(f"KAFKA_{name.upper().replace('.', '_')}") for name in wanted}
    assert {n: v for n, v in found.items() if n not in places} == {n: v for n, v in wanted.items() if n not in places}
    ivy = (ROOT / "include" / "ivy.xml").read_text()
    assert services["broker"]["image"] == "apache/kafka:" + re.findall(r'name="kafka_2.13" rev="([\d.]+)"', ivy)[0]


def test_broker_has_a_listener_inside_and_one_on_this_machine(services: dict[str, dict[str, Any]]) -> None:
    said = services["broker"]["environment"]
    told = dict(one.split("://") for one in said["KAFKA_ADVERTISED_LISTENERS"].split(","))
    bound = dict(one.split("://") for one in said["KAFKA_LISTENERS"].split(","))
    assert told == {"INSIDE": services["stream"]["environment"]["TIDEMARK_BROKERS"], "HOST": Settings(_env_file=None).brokers}
    assert services["broker"]["ports"] == [f"{told['HOST']}:{bound['HOST'].removeprefix(':')}"]
    assert bound["INSIDE"] == ":" + told["INSIDE"].partition(":")[2] and bound["CONTROLLER"].startswith("127.0.0.1:")
    assert set(bound) == {one.split(":")[0] for one in said["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")}


def test_driver_of_the_database_is_in_the_lock(services: dict[str, dict[str, Any]]) -> None:
    locked = {package["name"] for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    url = services["scheduler"]["environment"]["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
    assert url.startswith("postgresql+psycopg2://") and {"psycopg2-binary", "asyncpg"} <= locked


# --------------------------------------------------------------------------------------------- ports, state and secrets


def test_nothing_listens_beyond_loopback(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == len(set(published)) == 4
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    assert all("network_mode" not in service and not service.get("privileged") for service in services.values())
    assert services["api-server"]["environment"]["AIRFLOW__API__BASE_URL"] in {
        f"http://{port.rpartition(':')[0]}" for port in services["api-server"]["ports"]
    }


def test_everything_that_is_kept_is_on_a_named_volume(compose: dict[str, Any], services: dict[str, dict[str, Any]]) -> None:
    mounted = {
        name: {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]} for name, service in services.items()
    }
    assert {volume for mounts in mounted.values() for volume in mounts.values()} == set(compose["volumes"])
    for name, service in services.items():
        said = environment(service)
        keeps = [said[n] for n in ("TIDEMARK_HOME", "TIDEMARK_LAKE", "AIRFLOW_HOME", "KAFKA_LOG_DIRS", "PGDATA") if n in said]
        keeps += [v for n, v in said.items() if n.endswith("_PASSWORDS_FILE")]
        assert keeps, name
        assert [path for path in keeps if not any(Path(path).is_relative_to(place) for place in mounted[name])] == [], name
    assert all(mounted[name] == {image_environment()["TIDEMARK_HOME"]: "tidemark"} for name in ours(services))


VALUES = [line.split(": ", 1) for line in re.findall(r"^ +(?!#)([A-Z_]+: \S.*)$", COMPOSE, re.MULTILINE)]


def test_secret_of_a_robot_is_given_to_the_notifier_alone(services: dict[str, dict[str, Any]]) -> None:
    robots = {n for n in Settings.model_fields if n.startswith(("dingtalk_", "wecom_"))}
    given = {
        name: {n for n in service.get("environment") or {} if n.removeprefix("TIDEMARK_").lower() in robots}
        for name, service in services.items()
    }
    assert {name: len(known) for name, known in given.items() if known} == {"notify": len(robots)}
    said = {n: v for n, v in VALUES if n in given["notify"]}
    assert said == {n: f"${{{n}:-}}" for n in given["notify"]}


def test_notifier_is_told_of_the_airflow_whose_connections_it_may_ask_for(services: dict[str, dict[str, Any]]) -> None:
    said, airflow_s = (services[name]["environment"] for name in ("notify", "scheduler"))
    keys = {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW__CORE__FERNET_KEY"}
    assert {n: v for n, v in said.items() if n.startswith("AIRFLOW_")} == {n: airflow_s[n] for n in keys}
    assert said["TIDEMARK_NOTIFY_CONNECTIONS"] == "False"


def test_notifier_is_healthy_while_it_beats_and_may_finish(services: dict[str, dict[str, Any]]) -> None:
    said, service = environment(services["notify"]), services["notify"]
    [beat] = re.findall(r'find "\$(\w+)/([^"]+)" -mmin -1', service["healthcheck"]["test"][1])
    assert Path(said[beat[0]]) / beat[1] == Path(said["TIDEMARK_HOME"]) / "state" / "notify" / "heartbeat.json"
    pace = notifier.Pace()
    assert seconds(service["stop_grace_period"]) >= pace.closing + pace.answer + 5 > notifier.BEAT


def test_every_secret_comes_from_the_environment_and_has_no_default() -> None:
    secret = {n: v for n, v in VALUES if re.search(r"(PASSWORD|SECRET|FERNET_KEY|SECRET_KEY)$", n) or "://airflow:" in v}
    secret.pop("TIDEMARK_DINGTALK_SECRET")  # a robot need not be there
    assert len(secret) == 8
    for name, value in secret.items():
        [asked] = re.findall(r"\$\{(\w+):\?[^}]+\}", value)
        assert asked in SECRETS, name
        assert re.sub(r"\$\{\w+:\?[^}]+\}", "", value) in ("", "postgresql+psycopg2://airflow:@postgres/airflow")


def test_env_example_names_what_the_file_needs_and_no_other() -> None:
    asked = re.findall(r"(?<!\$)\$\{(\w+)(:[?-])?([^}]*)\}", COMPOSE)
    assert COMPOSE.replace("$$", "").count("$") == len(asked)
    needed = {name for name, how, _ in asked if how == ":?"}
    optional = {name: default for name, how, default in asked if how == ":-"}
    assert len(needed | optional.keys()) == len({name for name, *_ in asked})
    assert needed == SECRETS.keys()
    lines = dict(re.findall(r"^# (TIDEMARK_\w+)=(.*)$", EXAMPLE, re.MULTILINE))
    assert {name: lines.get(name) for name in optional} == optional
    defaults = Settings(_env_file=None)
    said = {n: getattr(defaults, n[len("TIDEMARK_") :].lower()) for n in optional}
    assert {n: "" if value is None else str(value) for n, value in said.items()} == optional


@pytest.mark.parametrize("missing", SECRETS)
def test_secret_that_is_not_set_is_refused_by_its_name(missing: str) -> None:
    found = read({n: v for n, v in SECRETS.items() if n != missing})
    assert found.returncode != 0 and f"required variable {missing} is missing a value: set it in .env" in found.stderr


@pytest.mark.parametrize("name", SECRETS)
def test_secret_is_made_by_the_line_above_it(name: str) -> None:
    [line] = re.findall(rf"^# (python3 -c .*)\n{name}=$", EXAMPLE, re.MULTILINE)
    python, *rest = shlex.split(line)
    made = {subprocess.run([sys.executable, *rest], capture_output=True, text=True, check=True).stdout.strip() for _ in range(2)}
    assert python == "python3" and len(made) == 2
    for one in made:
        assert re.fullmatch(r"[\w=-]{16,}", one)  # no sign that a URL or a shell would take for its own
        if name == "AIRFLOW_FERNET_KEY":
            Fernet(one)
        if name == "AIRFLOW_JWT_SECRET":
            assert len(one) >= 64


def test_passwords_are_written_as_airflow_reads_them(services: dict[str, dict[str, Any]]) -> None:
    [snippet] = [line for line in command_lines(services["init"]) if line[0] == "python"]
    passwords = {"AIRFLOW_ADMIN_PASSWORD": 'a"1', "AIRFLOW_VIEWER_PASSWORD": "b'2"}
    said = subprocess.run([sys.executable, *snippet[1:]], env=passwords, capture_output=True, text=True, check=True).stdout
    users = services["scheduler"]["environment"]["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"]
    assert json.loads(said) == {"admin": 'a"1', "viewer": "b'2"}
    assert {user.split(":")[0] for user in users.split(",")} == json.loads(said).keys()


# ------------------------------------------------------------------------------------------------------------ the image


def test_base_java_and_uv_are_pinned() -> None:
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == [
        "eclipse-temurin:17.0.19_10-jre-noble",
        "python:3.11.14-slim-bookworm",
        "python:3.11.14-slim-bookworm",  # the last stage has the Python that the environment was made with
    ]
    assert re.findall(r"pip install .*?uv(\S*)", DOCKERFILE) == ["==0.13.9"]
    assert "--locked" in DOCKERFILE and "--no-dev" in DOCKERFILE
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert pyproject["tool"]["uv"]["compile-bytecode"] is True
    [java] = re.findall(r"eclipse-temurin:(\d+)", DOCKERFILE)
    assert int(java) >= session.JAVA_WANTED


def test_images_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    others = {service["image"] for service in services.values() if "build" not in service}
    assert {image for image in others if not re.fullmatch(r"[\w/-]+:\d+\.[\d.]+(-\w+)?", image)} == set()
    assert {service["image"] for service in ours(services).values()} == {"tidemark:local"}


def test_image_runs_as_nobody_special() -> None:
    last = DOCKERFILE.rsplit("\nFROM ", 1)[1]
    [user] = re.findall(r"^USER (\d+)$", last, re.MULTILINE)
    assert int(user) > 0 and f"useradd --uid {user} " in last
    assert last.index("\nRUN ") < last.index("\nUSER ") and "\nRUN " not in last[last.index("\nUSER ") :]
    assert image_environment()["TIDEMARK_HOME"] in re.findall(r"install -d -o tidemark -g tidemark (\S+)", last)


def test_jars_are_baked_where_the_image_looks_for_them() -> None:
    [baked] = re.findall(r"TIDEMARK_JARS_DIR=(\S+) tidemark jars", DOCKERFILE)
    assert baked == image_environment()["TIDEMARK_JARS_DIR"]
    assert "COPY --from=build /opt/tidemark /opt/tidemark" in DOCKERFILE and baked.startswith("/opt/tidemark/")


SENT = ["pyproject.toml", "uv.lock", "README.md", "include/tidemark/speed.py", "include/ivy.xml", "dags/nightly.py"]
KEPT = [".env", ".git/config", ".venv/bin/python", ".tidemark/state/x", "tests/conftest.py", "include/tidemark/__pycache__/x.pyc"]


@pytest.mark.parametrize(("path", "sent"), [*((p, True) for p in SENT), *((p, False) for p in KEPT)])
def test_builder_is_sent_what_the_image_is_made_of(path: str, sent: bool) -> None:
    """By Docker's rules: a line excludes what it matches and all below, `!` takes it back, the last that matches counts."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        upto = [str(p) for p in [Path(path), *Path(path).parents][:-1]]
        names = [Path(p).name for p in upto] if pattern.startswith("**/") else upto
        deep = pattern.removeprefix("**/")
        if any(fnmatch.fnmatch(name, deep) and ("/" not in name or "/" in deep) for name in names):
            out = not line.startswith("!")
    assert out is not sent


# ---------------------------------------------------------------------------------------------------------- as processes


class Here:
    """The services' own commands, health checks and variables, as processes of this machine in a home of the test's.

    What differs is where things are: ports, paths, and SQLite for Postgres. The broker is the embedded one.
    """

    def __init__(self, services: dict[str, dict[str, Any]], settings: Settings) -> None:
        probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        self.api, health, page = (probe.getsockname()[1] for probe in probes)
        for probe in probes:
            probe.close()
        self.services, self.settings, self.popens = services, settings, dict[str, subprocess.Popen[bytes]]()
        self.places = {
            "/var/lib/tidemark": str(settings.home),
            "/opt/tidemark/jars": str(settings.jars),
            "/opt/tidemark": str(ROOT),
            "broker:9092": settings.brokers,
            "http://api-server:8080": f"http://127.0.0.1:{self.api}",
            "http://127.0.0.1:8080": f"http://127.0.0.1:{self.api}",
            "http://127.0.0.1:8974": f"http://127.0.0.1:{health}",
            "0.0.0.0": "127.0.0.1",
        }
        database = f"sqlite:///{settings.home}/airflow.db?timeout=30"
        self.own = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(settings.home),
            "JAVA_HOME": str(local.java().resolve().parent.parent),
            "TIDEMARK_METRICS_PORT": str(page),
            "AIRFLOW__CORE__FERNET_KEY": Fernet.generate_key().decode(),
            **dict.fromkeys(("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "TIDEMARK_AIRFLOW_DATABASE"), database),
            "AIRFLOW__API__PORT": str(self.api),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_HOST": "127.0.0.1",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_PORT": str(health),
        }

    def moved(self, text: str) -> str:
        for there, here in self.places.items():
            text = text.replace(there, here)
        return text

    def start(self, name: str, command: list[str] | None = None) -> subprocess.Popen[bytes]:
        said = {n: self.moved(v) for n, v in environment(self.services[name]).items()}
        argv = [self.moved(word).replace("$$", "$") for word in command or self.services[name]["command"]]
        with (self.settings.home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                argv, cwd=self.settings.home, env=said | self.own, stdout=log, stderr=log, start_new_session=True
            )

    def once(self, name: str) -> None:
        assert self.start(name).wait(180) == 0, self.log(name)

    def stay(self, *names: str) -> None:
        """Start services, and wait until the health check of each says yes."""
        for name in names:
            self.popens[name] = self.start(name)
        for name in names:
            kind, *words = self.services[name]["healthcheck"]["test"]
            deadline = time.monotonic() + 180
            while self.start(name, words if kind == "CMD" else ["bash", "-c", *words]).wait(60):
                assert self.popens[name].poll() is None and time.monotonic() < deadline, self.log(name)
                time.sleep(0.5)

    def log(self, name: str) -> str:
        return (self.settings.home / f"{name}.log").read_text(errors="replace")[-4000:]

    def stop(self, name: str) -> int:
        """SIGTERM, as a container engine sends it; the exit code, within the time that the file grants."""
        self.popens[name].send_signal(signal.SIGTERM)
        return self.popens[name].wait(seconds(self.services[name]["stop_grace_period"]))

    def end(self) -> None:
        for popen in self.popens.values():
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait(10)


@pytest.fixture
def here(services: dict[str, dict[str, Any]], settings: Settings, jars: Path) -> Iterator[Here]:
    settings.home.mkdir(parents=True)
    made = Here(services, settings)
    yield made
    made.end()


@pytest.mark.long
def test_services_run_from_this_file_become_healthy_and_end_when_told(here: Here) -> None:
    local.start_broker(here.settings)
    here.once("topics")
    here.once("init")
    kept = here.settings.home / "airflow" / "passwords.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    here.stay("stream", "stream-alarms", "notify", "api-server", "scheduler", "dag-processor", "triggerer")
    assert (
        "tidemark_broker_away" in urllib.request.urlopen(f"http://127.0.0.1:{here.own['TIDEMARK_METRICS_PORT']}").read().decode()
    )
    said = json.dumps({"username": "viewer", "password": json.loads(kept.read_text())["viewer"]}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{here.api}/auth/token", said, {"Content-Type": "application/json"})
    assert json.load(urllib.request.urlopen(asked))["access_token"]
    assert {name: here.stop(name) for name in reversed(here.popens)} == dict.fromkeys(here.popens, 0)
    assert local.status(here.settings)["heartbeat"]["state"] == "stopped"

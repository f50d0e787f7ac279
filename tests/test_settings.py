"""settings.py: what contradicts itself is refused in a sentence that names the variable, and a password is never shown."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from deltalake import DeltaTable, Field, Schema
from pydantic import ValidationError

from tidemark.__main__ import ending
from tidemark.settings import Settings

PASSWORD = "pw-3f9a27c4"
USER = {"kafka_protocol": "SASL_SSL", "kafka_user": "alice", "kafka_password": PASSWORD}


LENGTHS = (
    *("compact_every", "sweep_after", "rollback_for", "keep_records", "give_way_at", "watch_window", "stale_after", "late_after"),
    *("nightly_after", "nightly_patience", "notify_patience"),
)
COUNTS = ("replication", "batch_records", "chunk_records", "query_seconds")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA, two certificates and their keys, and the first key as OpenSSL wrote keys before PKCS #8."""
    folder, ca = tmp_path_factory.mktemp("pem"), trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    for name in ("one", "two"):
        certificate = ca.issue_cert(f"{name}.example")
        certificate.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
        certificate.private_key_pem.write_to_path(folder / f"{name}.old")
        key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), password=None)
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (folder / f"{name}.key").write_bytes(key.private_bytes(*form))
    return folder


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kafka_protocol": "TLS"}, r"TIDEMARK_KAFKA_PROTOCOL=TLS: Input should be 'PLAINTEXT', 'SSL'"),
        ({"kafka_protocol": "SASL_SSL"}, r"PROTOCOL is SASL_SSL, and TIDEMARK_KAFKA_USER is not set"),
        (USER | {"kafka_password": None}, r"PROTOCOL is SASL_SSL, and TIDEMARK_KAFKA_PASSWORD is not set"),
        (USER | {"kafka_password": ""}, r"PROTOCOL is SASL_SSL, and TIDEMARK_KAFKA_PASSWORD is not set"),
        (USER | {"kafka_protocol": "SSL"}, r"TIDEMARK_KAFKA_USER is set, and TIDEMARK_KAFKA_PROTOCOL is SSL, which has no user"),
        ({"kafka_password": PASSWORD}, r"TIDEMARK_KAFKA_PASSWORD is set, and TIDEMARK_KAFKA_PROTOCOL is PLAINTEXT"),
        ({"kafka_ca": "ca.pem"}, r"TIDEMARK_KAFKA_CA is set, and TIDEMARK_KAFKA_PROTOCOL is PLAINTEXT, which has no TLS"),
        (USER | {"kafka_ca": "gone.pem"}, r"TIDEMARK_KAFKA_CA=\S*/gone.pem: the file cannot be read \(No such file"),
        (USER | {"kafka_ca": "one.key"}, r"TIDEMARK_KAFKA_CA=\S*/one.key: the file holds no certificate in PEM"),
        (USER | {"kafka_certificate": "one.pem"}, r"TIDEMARK_KAFKA_CERTIFICATE is set, and TIDEMARK_KAFKA_KEY is not"),
        (USER | {"kafka_key": "one.key"}, r"TIDEMARK_KAFKA_KEY is set, and TIDEMARK_KAFKA_CERTIFICATE is not"),
        (USER | {"kafka_certificate": "one.pem", "kafka_key": "one.old"}, r"TIDEMARK_KAFKA_KEY=\S*: .* openssl pkcs8 -topk8"),
        (USER | {"kafka_certificate": "one.pem", "kafka_key": "two.key"}, r"TIDEMARK_KAFKA_KEY=\S* is not the key of TIDEMARK"),
        ({"trigger": "3s"}, r'TIDEMARK_TRIGGER=3s: "3s" is no trigger; write it like 3 seconds, 200 milliseconds or 1 minute'),
        ({"triggers": "alarms=2s"}, r'TIDEMARK_TRIGGERS=alarms=2s: "2s" is no trigger; write it like 3 seconds'),
        ({"triggers": "alarms 1 second"}, r"TIDEMARK_TRIGGERS=alarms 1 second: \"alarms 1 second\" is not STREAM=VALUE"),
        ({"driver_memories": "main=1g, =2g"}, r"TIDEMARK_DRIVER_MEMORIES=main=1g, =2g: \"=2g\" is not STREAM=VALUE"),
        (USER | {"kafka_protocol": "SASL_PLAINTEXT", "kafka_mechanism": "PLAIN"}, r"MECHANISM=PLAIN .* the password readable"),
        ({"driver_memory": "2048"}, r'TIDEMARK_DRIVER_MEMORY=2048: "2048" is not the size of a heap; write it like 1408m or 4g'),
        ({"driver_memories": "main=4g, alarms=lots"}, r'TIDEMARK_DRIVER_MEMORIES=.*: "lots" is not the size of a heap'),
        ({"driver_memory": "470m"}, r'TIDEMARK_DRIVER_MEMORY=470m: Spark needs a heap of 480m at the least, and "470m" is less'),
        ({"driver_memories": "main=4g, alarms=0m"}, r"TIDEMARK_DRIVER_MEMORIES=.*: Spark needs a heap of 480m at the least"),
        ({"brokers": ""}, r'TIDEMARK_BROKERS=: "" is no address of a broker; write it like 127.0.0.1:19092'),
        ({"brokers": "one:9092, two"}, r'TIDEMARK_BROKERS=one:9092, two: " two" is no address of a broker'),
        ({"brokers": "localhost:99999"}, r'TIDEMARK_BROKERS=localhost:99999: "localhost:99999" is no address of a broker'),
        ({"master": "localhost:7077"}, r'TIDEMARK_MASTER=localhost:7077: "localhost:7077" is no master of Spark; write it like'),
        ({"controller_port": 190930}, r"TIDEMARK_CONTROLLER_PORT=190930: Input should be less than or equal to 65535"),
        ({"airflow_port": 0}, r"TIDEMARK_AIRFLOW_PORT=0: Input should be greater than or equal to 1"),
        *(({name: "1m"}, rf'TIDEMARK_{name.upper()}=1m: "1m" is not a length of time; write it like') for name in LENGTHS),
        ({"keep_records": "999999 days"}, r'TIDEMARK_KEEP_RECORDS=999999 days: "999999 days" is more than a thousand years'),
        ({"query_rows": -1}, r"TIDEMARK_QUERY_ROWS=-1: Input should be greater than or equal to 0"),
        *(({name: 0}, rf"TIDEMARK_{name.upper()}=0: Input should be greater than or equal to 1") for name in COUNTS),
        ({"home": ROOT}, r"TIDEMARK_HOME=.*: tidemark itself is there; give a folder of its own"),
        *(
            (
                {where: f"/a/b{sign}c"},
                rf"Java, Spark or Kafka takes /a/b.* for another path, for {re.escape(sign)}; set TIDEMARK_{where.upper()} to",
            )
            for where in ("home", "jars_dir")
            for sign in (",", ":", '"', "#", "*", "?", "{", "}", "[", "]")
        ),
        *(
            (
                {where: f"/a/b {sign}c"},
                r"the lake would be /a/b .*, and no table is found below a path with '.{1,3}' in it; set",
            )
            for where in ("home", "lake")
            for sign in ("%41", "%2f", "\\", "\n", "\t")
        ),
    ],
)
def test_contradiction_is_one_sentence_that_names_the_variable(given: dict[str, Any], sentence: str, pem: Path) -> None:
    files = {n: pem / v for n, v in given.items() if n in ("kafka_ca", "kafka_certificate", "kafka_key")}
    with pytest.raises(ValidationError) as error:
        Settings(_env_file=None, **(given | files))
    code, said = ending(error.value) or (0, "")
    assert code == 2
    assert re.search(sentence, said), said
    assert PASSWORD not in said + str(error.value) + repr(error.value)


def test_what_belongs_together_is_taken(pem: Path) -> None:
    files = {"kafka_ca": pem / "ca.pem", "kafka_certificate": pem / "one.pem", "kafka_key": pem / "one.key"}
    for given in (
        USER | files,
        files | {"kafka_protocol": "SSL"},
        USER | {"kafka_protocol": "SASL_PLAINTEXT"},
        USER | {"kafka_mechanism": "PLAIN"},
    ):
        Settings(_env_file=None, **given)


def test_file_of_a_developers_own_settings_is_read_by_no_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("TIDEMARK_ZONE=Asia/Kolkata")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "from tidemark.settings import Settings; print(Settings().zone)"]
    assert Settings().zone == "UTC"
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "UTC\n"
    monkeypatch.delenv("TIDEMARK_ENV_FILE")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "Asia/Kolkata\n"


def test_empty_folder_is_the_one_that_is_had_unless_said_and_a_tilde_is_the_person_s_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line of `.env` is read by no shell."""
    for name in ("HOME", "LAKE", "JARS_DIR"):
        monkeypatch.setenv(f"TIDEMARK_{name}", "")
    settings, default = Settings(_env_file=None), Settings(_env_file=None, home=Path(".tidemark"), lake=None, jars_dir=None)
    assert (settings.home, settings.lake_path, settings.jars) == (default.home, default.lake_path, default.jars)
    assert Settings(_env_file=None, home=Path("~/tide")).home == Path.home() / "tide"


def test_line_of_the_file_that_names_no_setting_is_refused_and_shown_without_its_value(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"POSTGRES_PASSWORD=x\nTIDEMARK_KAFKA_PASWORD={PASSWORD}\n")
    with pytest.raises(ValidationError) as error:
        Settings(_env_file=tmp_path / ".env")
    assert ending(error.value) == (2, "TIDEMARK_KAFKA_PASWORD: there is no such setting; .env.example has them all")
    assert PASSWORD not in str(error.value)


def test_password_is_in_no_text_of_the_settings() -> None:
    settings = Settings(_env_file=None, **USER)
    assert PASSWORD not in f"{settings} {settings!r} {settings.model_dump()} {settings.model_dump_json()}"


def test_a_stream_has_its_own_trigger_and_heap_where_they_are_said() -> None:
    settings = Settings(
        _env_file=None,
        driver_memory="1536m",
        trigger="5 seconds",
        triggers="alarms=1 second",
        driver_memories="orders=3g, alarms=768m",
    )
    told = {s: (settings.of(s).trigger, settings.of(s).driver_memory) for s in ("main", "alarms", "orders")}
    assert told == {"main": ("5 seconds", "1536m"), "alarms": ("1 second", "768m"), "orders": ("5 seconds", "3g")}


@pytest.mark.parametrize("name", ["a b", "100%", "ä#+x?", "%zz", "{a},*'", "[1]|^"])
def test_a_lake_may_have_any_other_path(tmp_path: Path, name: str) -> None:
    DeltaTable.create(Settings(_env_file=None, lake=tmp_path / name / "lake").lake_path, Schema([Field("n", "long")]))
    assert DeltaTable(tmp_path / name / "lake").version() == 0

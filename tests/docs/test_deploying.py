"""Files in examples/deploy: each is parsed, and the commands that it runs are parsed or started."""

from __future__ import annotations

import configparser
import json
import re
import shlex

import httpx
import pytest
import yaml
from running_server import MODEL, running_server

from gptmanager.cli import command_parser
from gptmanager.server.http.keys import OPEN_PATHS
from gptmanager.server.main import server_settings

ROOT = MODEL.parents[1]
FOLDER = ROOT / "examples" / "deploy"
PREFIX = "GPTMANAGER_SERVE_"


def text_of(name):
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path):
    """Replace the places that a text names by ones that this machine has."""
    (tmp_path / "keys").write_text("me sk-me 4\nprometheus sk-prometheus\n")
    places = {
        "/models/model": MODEL,
        "/etc/gptmanager/keys": tmp_path / "keys",
        "/run/secrets/keys": tmp_path / "keys",
        "/etc/gptmanager/serve.toml": tmp_path / "serve.toml",
        "/run/gptmanager/socket": tmp_path / "socket",
    }

    def here(text):
        for place, own in places.items():
            text = text.replace(place, str(own))
        return text

    (tmp_path / "serve.toml").write_text(here(text_of("serve.toml")))
    return here


@pytest.fixture
def settings_of_call(here, monkeypatch):
    def settings(words, environment=()):
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, here(str(value)))
        options = command_parser().parse_args([here(word) for word in words])
        assert options.unknown_variables == []
        return server_settings(options)

    return settings


def dockerfile():
    """The entry point and the default command of the image."""
    lines = text_of("Dockerfile").replace("\\\n", " ").splitlines()
    found = dict(line.split(" ", 1) for line in lines if line.startswith(("ENTRYPOINT", "CMD")))
    return json.loads(found["ENTRYPOINT"]), json.loads(found["CMD"])


def variables(items):
    return {name: value for name, value in items if name.startswith(PREFIX)}


def test_the_image(settings_of_call):
    (program, *words), command = dockerfile()
    assert program.endswith("/bin/gptmanager")
    settings = settings_of_call([*words, *command])
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)
    copied = set(re.findall(r"^COPY (?!--from)(.+) \S+$", text_of("Dockerfile"), re.MULTILINE))
    names = {name for line in copied for name in line.split()}
    assert all((ROOT / name).exists() for name in names)
    kept = re.findall(r"^!(.+)$", text_of("Dockerfile.dockerignore"), re.MULTILINE)
    assert names == set(kept)
    check = re.search(r"HEALTHCHECK.*?(\[.*?\])$", text_of("Dockerfile"), re.DOTALL | re.MULTILINE)
    code = json.loads(check[1])[2]
    compile(code, "healthcheck", "exec")
    assert re.search(r"8000(/\S*)'", code)[1] in OPEN_PATHS


def test_compose(settings_of_call):
    compose = yaml.safe_load(text_of("compose.yaml"))
    server = compose["services"]["gptmanager"]
    (_, *words), _ = dockerfile()
    settings = settings_of_call([*words, *server["command"]], server["environment"])
    assert [key.name for key in settings.read_keys()] == ["me", "prometheus"]
    assert int(server["stop_grace_period"].rstrip("s")) > settings.shutdown_timeout
    assert server["read_only"] and (FOLDER / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    for service in compose["services"].values():
        for volume in service["volumes"]:
            place = volume.partition(":")[0]
            known = place.startswith("${MODEL") or place in compose["volumes"]
            assert known or (FOLDER / place).is_file(), volume
        assert set(service.get("secrets", [])) <= compose["secrets"].keys()
    scrape = yaml.safe_load(text_of("prometheus.yml"))["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": ["gptmanager:8000"]}]
    secret = scrape["authorization"]["credentials_file"].rpartition("/")[2]
    assert secret in compose["services"]["prometheus"]["secrets"]
    source = yaml.safe_load(text_of("grafana-datasource.yml"))["datasources"][0]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    path = yaml.safe_load(text_of("grafana-dashboards.yml"))["providers"][0]["options"]["path"]
    assert any(f":{path}/" in volume for volume in compose["services"]["grafana"]["volumes"])


def test_kubernetes(settings_of_call):
    deployment, service = yaml.safe_load_all(text_of("kubernetes.yaml"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (_, *words), _ = dockerfile()
    environment = {one["name"]: one["value"] for one in container["env"]}
    settings = settings_of_call([*words, *container["args"]], environment)
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait + settings.shutdown_timeout
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in OPEN_PATHS and asked["port"] == "http"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]


def test_systemd_and_nginx_and_the_server_that_they_start(settings_of_call):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read_string(text_of("gptmanager.service"))
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    settings = settings_of_call(words)
    assert program == dockerfile()[0][0]
    assert int(unit["Service"]["TimeoutStopSec"]) > settings.shutdown_timeout
    assert "MemoryDenyWriteExecute" not in unit["Service"]
    site = re.sub(r"#.*", "", text_of("nginx.conf"))
    assert site.count("{") == site.count("}")
    for line in filter(None, map(str.strip, site.splitlines())):
        assert line.endswith((";", "{", "}")), line
    assert f"server unix:{re.search('uds = .(.+).', text_of('serve.toml'))[1]};" in site
    timeout = int(re.search(r"proxy_read_timeout (\d+)s", site)[1])
    assert timeout > settings.request_timeout
    passed = re.compile(re.search(r"location ~ (\S+) \{", site)[1])
    for path in ("/v1/chat/completions", "/v1/models/a", "/health/ready", "/tokenize"):
        assert passed.search(path)
    for path in ("/metrics", "/", "/live/events", "/v1/load_lora_adapter", "/v2", "/v1/modelsx"):
        assert not passed.search(path)
    with running_server(settings) as server:
        transport = httpx.HTTPTransport(uds=str(settings.uds))
        with httpx.Client(transport=transport, base_url="http://models.example") as client:
            assert client.get("/health/ready").status_code == 200
            assert client.get("/metrics").status_code == 401
            key = {"Authorization": "Bearer sk-prometheus"}
            assert "gptmanager_num_requests_running" in client.get("/metrics", headers=key).text
        assert server.engine.card.name == "model"


def test_the_page_names_each_file():
    page = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    names = {path.name for path in FOLDER.iterdir()} - {"Dockerfile.dockerignore"}
    listed = {re.sub(r"^grafana-.*", "grafana-*.yml", name) for name in names}
    assert all(f"`{name}`" in page for name in listed)

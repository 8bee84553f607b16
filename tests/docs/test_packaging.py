"""What a user installs: the wheel's content, and what can be imported from where."""

import configparser
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from venv import EnvBuilder

import pytest

from gptmanager.environment import distribution
from gptmanager.environment.distribution import install_command

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "gptmanager": "gptmanager",
    "callbacks": "gptmanager/callbacks",
    "cuda": "gptmanager/cuda",
}
THIRD_PARTY = [path for path in sys.path if os.path.isdir(path) and Path(path) != ROOT]


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def library_files() -> dict[str, Path]:
    """Name inside the wheel -> file in the checkout."""
    return {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run(*command: str | Path, cwd: Path, path: list[str | Path]) -> str:
    """What a command prints that starts in `cwd` with `path` as PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_code(code: str, cwd: Path, path: list[str | Path]) -> str:
    """Run code without `site`, which would find what this environment has installed as editable."""
    return run(sys.executable, "-S", "-c", code, cwd=cwd, path=path)


def copied(folder: Path) -> Path:
    """A copy to build from: setuptools leaves files in its source and never removes stale ones."""
    shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=keep_only_what_is_packaged)
    return folder


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("source"))


def keep_only_what_is_packaged(folder, names):
    kept = {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", *FOLDERS}
    return set(names) - kept if Path(folder) == ROOT else {"__pycache__"}


@pytest.fixture(scope="session")
def pip(source):
    """Runs a pip command on the copy, with no network."""

    def pip(*arguments):
        command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--no-build-isolation"]
        run(*command, "--no-index", cwd=source, path=THIRD_PARTY)

    return pip


@pytest.fixture(scope="session")
def wheel(source, pip):
    pip("wheel", "--wheel-dir", source, source)
    return next(source.glob("*.whl"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    """Built from a copy of its own: what the wheel's build leaves would count as files of it."""
    source = copied(tmp_path_factory.mktemp("sdist"))
    (source / "tests").mkdir()
    for name in ("MANIFEST.in", "tests/test_house.py"):
        shutil.copy(ROOT / name, source / name)
    code = "from setuptools.build_meta import build_sdist; build_sdist('.')"
    run(sys.executable, "-c", code, cwd=source, path=THIRD_PARTY)
    return next(source.glob("*.tar.gz"))


def test_package_list_is_the_folders():
    folders = {name.rpartition("/")[0].replace("/", ".") for name in library_files()}

    assert set(setup_cfg()["options"]["packages"].split()) == folders


def test_wheel_holds_the_library_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())

    assert {"gptmanager/py.typed", "gptmanager/cuda/device/device.py"} <= names
    assert {name for name in names if ".dist-info/" not in name} == library_files().keys()


def test_a_wheel_has_its_command_version_and_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist()}

    assert "gptmanager = gptmanager.__main__:main" in texts["entry_points.txt"]
    assert {"Name: gptmanager-engine", "License: Apache-2.0"} <= set(texts["METADATA"].splitlines())
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize(
    ("installed", "started_in", "found_in"),
    [
        ("nothing", "root", "root"),
        ("wheel", "root", "root"),  # its gptmanager/ hides the installed one
        ("wheel", "elsewhere", "target"),
        ("editable", "elsewhere", "source"),
    ],
)
@pytest.mark.every(4)
def test_mapped_packages_import(source, pip, wheel, tmp_path, installed, started_in, found_in):
    # Given
    target = tmp_path / "target"
    places = {"root": ROOT, "elsewhere": tmp_path, "target": target, "source": source}
    if installed == "wheel":
        zipfile.ZipFile(wheel).extractall(target)
    elif installed == "editable":
        pip("install", "--target", target, "-e", source)

    # When
    files = run_code(
        f"import site, json; site.addsitedir({str(target)!r})\n"
        "import gptmanager, gptmanager.callbacks, gptmanager.cuda.device.device as device\n"
        "print(json.dumps([m.__file__ for m in (gptmanager, gptmanager.callbacks, device)]))",
        cwd=places[started_in],
        path=[target, *THIRD_PARTY],
    )

    # Then
    assert all(Path(file).is_relative_to(places[found_in]) for file in json.loads(files))


@pytest.mark.slow
def test_source_distribution_holds_the_library_and_its_setup(sdist):
    with tarfile.open(sdist) as archive:
        names = {it.name.partition("/")[2] for it in archive.getmembers() if it.isfile()}

    library = {path.relative_to(ROOT).as_posix() for path in library_files().values()}
    others = {name for name in names - library if ".egg-info/" not in name}
    assert library <= names
    assert others == {
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
    }


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.slow
def test_what_is_built_works_in_a_clean_environment(request, tmp_path, kind):
    """Its dependencies are on the path of the environment; they bring no editable install."""
    # Given
    built, environment = request.getfixturevalue(kind), tmp_path / "environment"
    EnvBuilder(symlinks=True).create(environment)
    python = environment / "bin/python"
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if Path(path).name == "site-packages")
    )

    # When
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    options = ["--no-build-isolation", "--no-compile", "--ignore-installed"]
    run(*pip, *options, built, cwd=tmp_path, path=[])
    version = run(environment / "bin/gptmanager", "--version", cwd=tmp_path, path=[])
    code = "import gptmanager.callbacks, gptmanager.cuda as cuda; print(*cuda.__path__)"
    imported = run(python, "-c", code, cwd=tmp_path, path=[])

    # Then
    assert version.split()[-1] == distribution.VERSION
    assert imported.strip() == str(site / "gptmanager/cuda")
    files = {it for it in (site / "gptmanager").rglob("*") if "__pycache__" not in it.parts}
    names = {it.relative_to(site).as_posix() for it in files if it.is_file()}
    assert names == library_files().keys()
    data = {".html", ".cu", ".cuh", ".h", ".cpp", ".json", ".typed"}
    assert data < {Path(f"x{Path(name).name}").suffix for name in names}


def test_make_installs_into_its_environment_what_the_callers_python_path_has():
    probe = "--eval=probe: ; @echo found ${PYTHONPATH-nothing}".replace("$", "$$")
    assert "found nothing" in run("make", probe, "probe", cwd=ROOT, path=["/elsewhere"])


def test_importing_the_library_imports_its_requirements_and_nothing_else():
    requirements = re.findall(r"^\w+", setup_cfg()["options"]["install_requires"], re.MULTILINE)
    new = run_code(
        f"import sys, {', '.join(requirements)}; before = set(sys.modules)\n"
        "from gptmanager import *\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - sys.stdlib_module_names))",
        cwd=ROOT,
        path=THIRD_PARTY,
    )

    assert set(new.split()) - set(requirements) == {"gptmanager"}


def test_every_requirement_of_an_extra_is_used():
    """An extra without such a requirement installs faster, and breaks less often."""
    modules = {"cupy-cuda12x": "cupy", "cupy-cuda13x": "cupy", "grpcio": "grpc"}
    modules["cuda-bindings"] = "cuda.bindings"
    extras = setup_cfg()["options.extras_require"]
    code = [path for path in library_files().values() if path.suffix == ".py"]
    code += (ROOT / "examples").glob("*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in code)
    for extra in ("cuda12", "cuda13", "guided", "hf", "mpi", "ray", "metrics", "server", "triton"):
        names = re.findall(r"^[\w-]+", extras[extra], re.MULTILINE)
        assert names, extra
        for name in names:
            module = re.escape(modules.get(name, name.replace("-", "_")))
            assert re.search(rf"\b(import|from) {module}\b|[\"(]{module}[\").]", text), name


@pytest.mark.parametrize("init_file", [False, True])
def test_the_root_hides_nothing_of_nvidia(tmp_path, init_file):
    """CuPy imports cuda.pathfinder, from a namespace package `cuda` as faked here."""
    root, site = tmp_path / "root", tmp_path / "site"
    (site / "cuda/pathfinder").mkdir(parents=True)
    (site / "cuda/pathfinder/__init__.py").touch()
    shutil.copytree(ROOT / "cuda", root / "cuda")
    if init_file:
        (root / "cuda/__init__.py").touch()  # the mistake that this test is here for
        with pytest.raises(AssertionError, match="No module named 'cuda.pathfinder'"):
            run_code("import cuda.pathfinder", cwd=root, path=[site])
    else:
        run_code("import cuda.pathfinder", cwd=root, path=[site])


def test_no_file_of_cuda_has_a_name_of_nvidias():
    taken = {"bindings", "cccl", "compute", "core", "pathfinder", "tile"}

    assert not taken & {path.stem for path in (ROOT / "cuda").iterdir()}


@pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy, an extra")
def test_cupy_imports_from_the_root():
    run_code("import cupy, gptmanager.cuda.device.device", cwd=ROOT, path=THIRD_PARTY)


# Until the distribution is on a package index, its name there may be anybody's --------------------

OURS = r"gptmanager(?:[-_]engine)?"
FROM_AN_INDEX = re.compile(
    rf"\b{OURS}\[[\w,-]+\](?! @)"  # gptmanager[server], but not `... @ file:///...`
    rf"|\b(?:pip3?|pipx|uv|poetry|conda)\b[^\n`]*\b(?:install|add)\b[^\n`]*[ '\"]{OURS}"
    r"(?=[ '\"`=<>~;.,)]|$)(?! @)",
    re.MULTILINE,
)


def texts() -> dict[str, str]:
    """Every text of the repository that a person may follow, by its path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split() or [str(it.relative_to(ROOT)) for it in ROOT.rglob("*.md")]
    kinds = (".py", ".md", ".cfg", ".toml", ".html", ".yml", "Makefile", ".sh")
    return {
        name: (ROOT / name).read_text("utf-8")
        for name in names
        if name.endswith(kinds)
        and name != "tests/docs/test_packaging.py"
        and (ROOT / name).exists()
    }


def test_no_text_installs_ours_from_an_index():
    found = [
        f"{name}: {hit[0]}"
        for name, text in texts().items()
        for hit in FROM_AN_INDEX.finditer(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("pip install gptmanager", True),
        ("pip install 'gptmanager[server]'", True),
        ("the extra gptmanager[ray]", True),
        ("uv add gptmanager-engine", True),
        ("pip install torch gptmanager==1", True),
        ("pip install -e '.[server]'", False),
        ("pip install dist/gptmanager_engine-0.1.0-py3-none-any.whl", False),
        ("pip install 'dist/gptmanager_engine-0.1.0-py3-none-any.whl[server]'", False),
        ("pip install 'gptmanager-engine[server] @ file:///x.whl'", False),
        ("`pip install -e .` and then `gptmanager run`", False),
    ],
)
def test_what_installs_from_an_index(text, is_found):
    assert bool(FROM_AN_INDEX.search(text)) is is_found


@pytest.mark.parametrize("extra", ["server", "triton", "guided", "metrics", "mpi", "cuda13", "ray"])
def test_the_command_for_an_extra_installs_what_it_lists(monkeypatch, extra):
    listed = setup_cfg()["options.extras_require"][extra]
    wanted = [line for line in listed.split("\n") if line and not line.startswith("#")]
    metadata = [f'{it} {"and" if ";" in it else ";"} extra == "{extra}"' for it in wanted]
    metadata = [it.replace(" ; ", "; ") for it in metadata]
    metadata += ["torch>=2", 'other>=1; extra == "another"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: metadata)
    assert shlex.split(install_command(extra)) == ["pip", "install", *wanted]


def test_in_an_uninstalled_checkout_the_command_names_the_checkout(monkeypatch):
    def refuse(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", refuse)
    assert install_command("server") == f"pip install -e '{ROOT}[server]'"

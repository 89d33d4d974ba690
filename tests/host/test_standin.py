"""The CANN stand-in, on a small wheel compiled for the purpose, and once for real."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cannopy.backend.host import standin
from cannopy.backend.host.standin import EnvironmentProblem, cann, compiler, scan
from cannopy.backend.host.standin.elf import SharedObject
from cannopy.backend.host.standin.manifest import LIBRARY_NAME, MANIFEST_NAME, Manifest
from cannopy.backend.host.standin.source import BODIES, c_source
from cannopy.backend.host.standin.wheel import Search, locate

pytestmark = pytest.mark.skipif(compiler.find_compiler() is None, reason="builds small libraries")

CORE = """
extern int aclrtGetDeviceCount(unsigned *);
extern long c10_thing(void), aclMadeUp(void), dlclose(void *);
extern long method(void) __asm__("_ZN2ge5Graph6MethodERKSsi");
extern void *vtable[] __asm__("_ZTVN2ge5ThingE");
extern int snprintf_s(char *, unsigned long, unsigned long, const char *, ...);
__attribute__((weak)) extern long absent_and_weak(void);
const char *looked_up = "aclrtLookedUp", *an_operator = "aclnnMatmul";
long devices(void) { unsigned n = 7; return aclrtGetDeviceCount(&n) * 100 + n; }
long all_zero(void) { return aclMadeUp() + method() + (long)vtable[2]; }
long written(char *to) { return snprintf_s(to, 8, 7, "%d-%s", 12, "ab"); }
long too_long(char *to) { return snprintf_s(to, 4, 3, "%s", "abcdef"); }
void *keep[] = {(void *)dlclose, (void *)c10_thing, (void *)absent_and_weak};
"""


def make_wheel(site: Path, torch: str = "2.13.0+cpu", torch_npu: str = "2.13.0") -> Path:
    """A site-packages with a torch_npu that needs libascendcl.so and libfoo_ge.so, which nobody has."""
    for name, version in (("torch", torch), ("torch_npu", torch_npu)):
        (site / name / "lib").mkdir(parents=True)
        (site / name / "__init__.py").write_text("raise ImportError('never imported by the installer')\n")
        (site / f"{name}-{version}.dist-info").mkdir()
    for module in ("google/protobuf", "packaging", "numpy", "yaml"):
        (site / module).mkdir(parents=True)
        (site / module / "__init__.py").touch()
    work = site.parent / "work"
    work.mkdir()
    (work / "empty.c").write_text("")
    (work / "c10.c").write_text("long c10_thing(void) { return 0; }\n")
    (work / "core.c").write_text(CORE)

    def cc(*arguments: str) -> None:
        command = compiler.find_compiler() or []
        subprocess.run([*command, "-shared", "-fPIC", *arguments], cwd=work, check=True)

    for name in ("libascendcl.so", "libfoo_ge.so"):
        cc("empty.c", "-o", name, f"-Wl,-soname,{name}")
    cc("c10.c", "-o", str(site / "torch/lib/libc10.so"), "-Wl,-soname,libc10.so")
    cc(
        "core.c",
        *(
            "-o",
            str(site / "torch_npu/lib/libtorch_npu.so"),
            "-Wl,--no-as-needed",
            "-Wl,--unresolved-symbols=ignore-all",
        ),
        *("libascendcl.so", "libfoo_ge.so", str(site / "torch/lib/libc10.so")),
        *("-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN/../../torch_npu.libs:$ORIGIN/../../torch/lib"),
    )
    return site


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(tmp_path_factory.mktemp("wheel") / "site-packages")


@pytest.fixture
def site(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the small wheel, on a machine without CANN, which is also what `Search.here` finds."""
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cann, "INSTALL_ROOT", tmp_path / "Ascend")
    monkeypatch.setattr(cann, "LOADER_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    copy = shutil.copytree(built, tmp_path / "site-packages", symlinks=True)
    monkeypatch.setattr(Search, "here", lambda: Search((str(copy),), sys.executable))
    return copy


def load(site: Path, expression: str) -> str:
    code = f"import ctypes; core = ctypes.CDLL({str(site / 'torch_npu/lib/libtorch_npu.so')!r}); print({expression})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else done.stderr.splitlines()[-1]


def snapshot(folder: Path) -> dict[str, str]:
    return {p.name: os.readlink(p) if p.is_symlink() else p.read_bytes().hex() for p in folder.iterdir()}


def fake_cann(home: Path) -> Path:
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / cann.RUNTIME).touch()
    (home / "set_env.sh").touch()
    return home


def test_scan_finds_exactly_what_nobody_has(site: Path) -> None:
    want = scan.wanted(locate(Search.site(site)))
    assert want.libraries == {"libascendcl.so", "libfoo_ge.so", *scan.OPENED_BY_NAME}
    assert want.symbols == {
        *("aclrtGetDeviceCount", "aclMadeUp", "snprintf_s", "_ZN2ge5Graph6MethodERKSsi", "_ZTVN2ge5ThingE"),
        "aclrtLookedUp",  # a string only; dlclose, c10_thing, the weak one and aclnn* are not wanted
    }


def test_reader_does_not_care_for_the_machine(site: Path, tmp_path: Path) -> None:
    path = site / "torch_npu/lib/libtorch_npu.so"
    other = bytearray(path.read_bytes())
    other[18:20] = (183 if other[18] == 62 else 62).to_bytes(2, "little")  # e_machine: AArch64 is 183, x86-64 is 62
    (tmp_path / "other.so").write_bytes(other)
    with SharedObject(path) as here, SharedObject(tmp_path / "other.so") as there:
        assert there.unversioned_imports() == here.unversioned_imports()
        assert there.dynamic().needed == here.dynamic().needed
        assert any(p.endswith("/../../torch_npu.libs") and "$ORIGIN" not in p for p in here.dynamic().search)


def test_install_makes_the_wheel_load(site: Path) -> None:
    assert "libascendcl.so: cannot open shared object file" in load(site, "1")
    assert standin.status(site).state == "missing"
    done = standin.install(site)
    assert (done.state, done.changed, done.cure) == ("installed", True, "")
    assert load(site, "core.devices(), core.all_zero()") == "0 0"
    texts = "(b := ctypes.create_string_buffer(8)), core.written(b), b.value, core.too_long(b), b.value"
    assert load(site, f"[{texts}][1:]") == "[5, b'12-ab', -1, b'abc']"


def test_install_twice_changes_nothing(site: Path) -> None:
    standin.install(site)
    before = {p: p.lstat().st_mtime_ns for p in (site / "torch_npu.libs").iterdir()}
    again = standin.install(site)
    assert (again.state, again.changed) == ("installed", False)
    assert {p: p.lstat().st_mtime_ns for p in (site / "torch_npu.libs").iterdir()} == before
    contents = snapshot(site / "torch_npu.libs")
    assert standin.install(site, force=True).changed
    assert snapshot(site / "torch_npu.libs") == contents  # the build is reproducible


def edit_version(site: Path) -> None:
    (site / "torch_npu-2.13.0.dist-info").rename(site / "torch_npu-2.13.1.dist-info")


def edit_core(site: Path) -> None:
    with (site / "torch_npu/lib/libtorch_npu.so").open("ab") as file:
        file.write(b"rebuilt")


def edit_generator(site: Path) -> None:
    path = site / "torch_npu.libs" / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "generator": "older"}))


def edit_manifest(site: Path) -> None:
    (site / "torch_npu.libs" / MANIFEST_NAME).write_text("{")


def edit_library(site: Path) -> None:
    (site / "torch_npu.libs" / LIBRARY_NAME).write_bytes(b"\x7fELF truncated")


def edit_link(site: Path) -> None:
    (site / "torch_npu.libs" / "libfoo_ge.so").unlink()


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (edit_version, "built for torch_npu 2.13.0, and 2.13.1 is installed"),
        (edit_core, "libtorch_npu.so of torch_npu 2.13.0 has changed"),
        (edit_generator, "another version of cannopy"),
        (edit_manifest, "without a readable manifest"),
        (edit_library, f"{LIBRARY_NAME} is missing or damaged"),
        (edit_link, "libfoo_ge.so is missing or damaged"),
    ],
)
def test_stale_is_seen_and_rebuilt(site: Path, edit: object, reason: str) -> None:
    standin.install(site)
    edit(site)  # type: ignore[operator]
    found = standin.status(site)
    assert found.state == "stale"
    assert reason in found.reason
    assert found.cure.endswith(f"host install --site-packages {site}")
    with pytest.raises(EnvironmentProblem, match="stale"):
        standin.ensure_importable()
    assert standin.install(site).changed
    assert standin.status(site).state == "installed"
    assert load(site, "core.devices()") == "0"


def test_touching_the_core_is_not_a_change(site: Path) -> None:
    standin.install(site)
    os.utime(site / "torch_npu/lib/libtorch_npu.so", (1, 1))
    assert standin.status(site).state == "installed"


def test_uninstall_removes_all_and_only_its_own(site: Path) -> None:
    tree = sorted(site.rglob("*"))
    standin.install(site)
    (site / "torch_npu.libs" / "libuser.so").write_text("theirs")
    assert standin.uninstall(site).changed
    assert [p.name for p in (site / "torch_npu.libs").iterdir()] == ["libuser.so"]
    (site / "torch_npu.libs" / "libuser.so").unlink()
    standin.install(site)
    assert standin.uninstall(site).state == "missing"
    assert sorted(site.rglob("*")) == tree
    assert not standin.uninstall(site).changed


def test_foreign_files_are_kept(site: Path) -> None:
    libs = site / "torch_npu.libs"
    libs.mkdir()
    (libs / "libascendcl.so").write_text("theirs")
    assert standin.status(site).state == "foreign"
    with pytest.raises(EnvironmentProblem, match=r"libascendcl\.so is in .* libfoo_ge\.so is missing") as caught:
        standin.install(site)
    assert "host install --force" in caught.value.cure
    assert snapshot(libs) == {"libascendcl.so": b"theirs".hex()}
    (libs / "libfoo_ge.so").write_text("theirs")  # now complete: the user made a stand-in of their own
    assert standin.install(site).cure == ""
    assert (libs / "libascendcl.so").read_text() == "theirs"
    assert not standin.uninstall(site).changed
    assert standin.install(site, force=True).state == "installed"


def test_a_file_replaced_after_install_is_kept(site: Path) -> None:
    standin.install(site)
    link = site / "torch_npu.libs" / "libascendcl.so"
    link.unlink()
    link.write_text("theirs")
    found = standin.status(site)
    assert (found.state, "--force" in found.cure) == ("foreign", True)
    with pytest.raises(EnvironmentProblem):
        standin.install(site)
    standin.uninstall(site)
    assert [p.name for p in link.parent.iterdir()] == ["libascendcl.so"]


def test_no_compiler(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    release = tmp_path / "os-release"
    monkeypatch.setattr(compiler, "_OS_RELEASE", release)
    for text, cure in (('ID="openEuler"\n', "dnf install -y gcc"), ("ID=ubuntu\n", "apt-get install -y gcc")):
        release.write_text(text)
        with pytest.raises(EnvironmentProblem, match="no C compiler") as caught:
            standin.install(site)
        assert caught.value.cure.removeprefix("sudo ") == cure
    assert not (site / "torch_npu.libs").exists()


def test_failed_build_leaves_what_was_there(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(site)
    before = snapshot(site / "torch_npu.libs")
    monkeypatch.setenv("CC", "false")
    with pytest.raises(EnvironmentProblem, match="C compiler `false` failed"):
        standin.install(site, force=True)
    assert snapshot(site / "torch_npu.libs") == before
    assert not list(site.glob(".cannopy-*"))


@pytest.mark.parametrize(("number", "uid", "cure"), [(13, 1000, "sudo /"), (30, 0, "-m venv"), (28, 0, "df -h")])
def test_unwritable_site(site: Path, monkeypatch: pytest.MonkeyPatch, number: int, uid: int, cure: str) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(EnvironmentProblem, match=f"cannot be written: {os.strerror(number)}") as caught:
        standin.install(site)
    assert cure in caught.value.cure


def test_real_cann_is_never_covered(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(site)
    home = fake_cann(tmp_path / "cann")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    assert standin.real_cann_present()
    hidden = standin.status(site)
    assert (hidden.state, "host uninstall" in hidden.cure) == ("stale", True)
    with pytest.raises(EnvironmentProblem, match="real CANN is installed") as caught:
        standin.install(site, force=True)
    assert "host uninstall" in caught.value.cure
    assert standin.uninstall(site).state == "not needed"
    with pytest.raises(EnvironmentProblem, match="not set up in this shell") as caught:
        standin.ensure_importable()
    assert caught.value.cure == f"source {home}/set_env.sh"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{home / 'lib64'}")
    standin.ensure_importable()


def test_places_where_cann_is_found(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not standin.real_cann_present()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(standin.install(site).folder))
    assert not standin.real_cann_present()  # our own folder
    (tmp_path / "ld.so.cache").write_bytes(b"libascendcl.so\0/opt/x/libascendcl.so\0")
    found = cann.find_cann()
    assert found is not None
    assert (str(found.library), found.loadable) == ("/opt/x/libascendcl.so", True)
    (tmp_path / "ld.so.cache").unlink()
    fake_cann(tmp_path / "Ascend" / "ascend-toolkit" / "latest")
    assert standin.real_cann_present()


def test_path_to_no_cann(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(site)
    standin.ensure_importable()
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    with pytest.raises(EnvironmentProblem, match="no CANN is there") as caught:
        standin.ensure_importable()
    assert caught.value.cure == "unset ASCEND_HOME_PATH"


def test_each_missing_part_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        EnvironmentProblem, match=r"is missing: torch_npu needs libascendcl\.so, libfoo_ge\.so"
    ) as caught:
        standin.ensure_importable()
    assert caught.value.cure.endswith("host install")
    shutil.rmtree(site / "google")
    with pytest.raises(EnvironmentProblem, match=r"protobuf \(torchair's GE graph\)") as caught:
        standin.ensure_importable()
    assert caught.value.cure == f"{sys.executable} -m pip install protobuf"
    (site / "torch-2.13.0+cpu.dist-info").rename(site / "torch-2.12.1.dist-info")
    with pytest.raises(EnvironmentProblem, match=r"torch 2\.12\.1 and torch_npu 2\.13\.0 do not belong") as caught:
        standin.ensure_importable()
    assert '"torch==2.13.*"' in caught.value.cure
    shutil.rmtree(site / "torch")
    with pytest.raises(EnvironmentProblem, match="torch is not installed"):
        standin.install(site)
    shutil.rmtree(site / "torch_npu")
    with pytest.raises(EnvironmentProblem, match="torch_npu is not installed") as caught:
        standin.ensure_importable()
    assert '"torch_npu==2.12.*"' in caught.value.cure
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(EnvironmentProblem, match="Linux on x86-64 and arm64 only"):
        standin.ensure_importable()


def test_manifest_names_what_it_was_built_from(site: Path) -> None:
    folder = standin.install(site).folder
    manifest = Manifest.read(folder)
    assert manifest is not None
    assert manifest.torch_npu == "2.13.0"
    assert set(manifest.files) == {p.name for p in folder.iterdir()} - {MANIFEST_NAME}
    assert manifest.core.size == (site / "torch_npu/lib/libtorch_npu.so").stat().st_size


def test_every_body_compiles_without_warning(tmp_path: Path) -> None:
    source = tmp_path / "all.c"
    source.write_text(c_source(BODIES))
    command = [*(compiler.find_compiler() or []), "-std=c11", "-Wall", "-Werror", "-fsyntax-only", str(source)]
    subprocess.run(command, check=True)
    with pytest.raises(ValueError, match="not a linker symbol"):
        c_source(['x"); int main('])


def test_interrupted_placing_shows_as_stale(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = os.replace, []

    def die_at_the_third(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 3:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            standin.install(site)
    assert standin.status(site).state == "stale"
    assert standin.install(site).state == "installed"


@pytest.mark.slow
def test_this_environment_imports_without_any_variable() -> None:
    pytest.importorskip("torch_npu", reason="the real wheel is not installed")
    code = (
        "import torch, torch_npu; from torch_npu.dynamo import torchair; import torchair\n"
        "assert not torch.npu.is_available() and torch.npu.device_count() == 0\n"
        "assert torch.ops.npu.npu_rms_norm.default\n"
        "try: torch.empty(1, device='npu')\n"
        "except RuntimeError as error: assert 'Invalid device ID' in str(error), error\n"
        "else: raise AssertionError('a device was made up')\n"
    )
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr

"""Plugins as installers leave them on disk: metadata folders and modules, read for real."""

import sys

import pytest

from runnerctl import PluginHost
from runnerctl.hookspecs import ENTRY_POINT_GROUP

MODULE = """
import pathlib
from runnerctl import hookimpl

pathlib.Path(__file__).with_suffix(".imported").touch()

@hookimpl
def select_runner(config):
    return None
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the import path; `site(distribution, entry points)` installs into it."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(distribution, entries, *, metadata=True):
        info = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{entries}\n")

    def add_module(name):
        (tmp_path / f"{name}.py").write_text(MODULE)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return tmp_path / f"{name}.imported"

    install.module = add_module
    return install


def record(host, name):
    (found,) = [r for r in host.records if r.name == name]
    return found


@pytest.mark.parametrize(
    "blocking", [{"plugins": ["no:disk policy"]}, {"allowed": []}], ids=["no:", "allow list"]
)
def test_a_blocked_plugin_leaves_no_trace_of_an_import(site, blocking):
    imported = site.module("disk_policy_module")
    site("disk-policy", " Disk Policy = disk_policy_module")
    host = PluginHost.discover(**blocking)
    assert record(host, "disk policy").status == "blocked"
    assert record(host, "disk policy").version == "1.5"
    assert not imported.exists()
    assert "disk_policy_module" not in sys.modules

    assert record(PluginHost.discover(plugins=["DISK POLICY "]), "disk policy").status == "active"
    assert imported.exists()
    sys.modules.pop("disk_policy_module")


def test_the_way_out_for_a_name_with_a_space_can_be_pasted_into_a_shell(site):
    site("disk-policy", "disk policy = no_such_module_anywhere")
    (problem,) = PluginHost.discover().problems
    assert "-p 'no:disk policy'" in problem.remedy


def test_one_distribution_that_uses_a_name_twice(site):
    site.module("disk_policy_module")
    site("disk-policy", "acme = disk_policy_module\nAcme = disk_policy_module")
    host = PluginHost.discover()
    assert {r.status for r in host.records if r.name == "acme"} == {"failed"}
    assert "used more than once: disk-policy 1.5, disk-policy 1.5" in host.problems[0].message


@pytest.mark.parametrize("entry", ["acme = not a module!", "acme = disk_policy_module:nothing"])
def test_an_entry_point_that_leads_nowhere(site, entry):
    site.module("disk_policy_module")
    site("disk-policy", entry)
    assert record(PluginHost.discover(), "acme").status == "failed"
    sys.modules.pop("disk_policy_module", None)


def test_metadata_of_a_half_removed_distribution(site):
    site.module("disk_policy_module")
    site("disk-policy", "acme = disk_policy_module", metadata=False)
    found = record(PluginHost.discover(), "acme")
    assert (found.status, found.version) == ("active", "unknown")
    sys.modules.pop("disk_policy_module")


def test_two_hosts_with_the_same_settings_find_the_same(site):
    site.module("disk_policy_module")
    site("disk-policy", "acme = disk_policy_module\nbroken = no_such_module_anywhere\nthird = x")
    settings = {"plugins": ["no:third"], "allowed": ["acme", "broken"]}

    def found():
        return {
            (r.name, r.distribution, r.version, r.status)
            for r in PluginHost.discover(**settings).records
        }

    once = found()
    assert {status for *_, status in once} == {"active", "blocked", "failed"}
    assert found() == once
    sys.modules.pop("disk_policy_module")

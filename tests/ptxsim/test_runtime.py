"""The names that translated code is run with."""

from importlib import import_module

from cupyflash.ptxsim import runtime


def test_no_two_modules_give_one_name_to_different_things():
    for name in runtime._MODULES:
        module = import_module(f"cupyflash.ptxsim.{name}")
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        assert [key for key, value in public.items() if runtime.NAMESPACE[key] is not value] == []

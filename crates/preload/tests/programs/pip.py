"""A package built, installed by pip into a directory and into an environment there, and used from it."""
import os
import subprocess
import sys
import zipfile

root = sys.argv[1]
os.chdir(root)
os.mkdir("home")
environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV", "PYENV"))}
environment.update(HOME=root + "/home", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INDEX="1", PIP_ROOT_USER_ACTION="ignore", PIP_CONFIG_FILE="/dev/null", TMPDIR=root + "/home")


def run(*words, **more):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**environment, **more})
    print(done.returncode, done.stdout)


source = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { (void)self; (void)none; return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", NULL, -1, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit_native(void) { return PyModule_Create(&module); }
"""
import sysconfig

with open("native.c", "w") as f:
    f.write(source)
include = sysconfig.get_path("include")
native = os.path.exists(include + "/Python.h") and subprocess.run(["cc", "-shared", "-fPIC", "-I" + include, "-o", "native.so", "native.c"]).returncode == 0
with zipfile.ZipFile("thing-1.0-py3-none-any.whl", "w") as wheel:
    for name, text in {
        "thing/__init__.py": "from .part import double\n",
        "thing/part.py": "import importlib.resources\ndef double(n):\n    return 2 * n\ndef data():\n    return importlib.resources.read_text('thing', 'data.txt')\ndef main():\n    import sys\n    print('thing says', double(int(sys.argv[1])), data())\n",
        "thing/data.txt": "of the package",
        "thing-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
        "thing-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "thing-1.0.dist-info/entry_points.txt": "[console_scripts]\nthing = thing.part:main\n",
        "thing-1.0.dist-info/RECORD": "",
    }.items():
        wheel.writestr(name, text)
    if native:
        wheel.write("native.so", "thing/native.so")

use = "import thing, thing.part, os; print(thing.double(4), thing.part.data(), os.path.relpath(thing.__file__)" + (", __import__('thing.native').native.answer())" if native else ")")
run(sys.executable, "-m", "pip", "install", "-q", "--target", "site", root + "/thing-1.0-py3-none-any.whl")
run(sys.executable, "-c", use, PYTHONPATH="site")
run(sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--target", "site", "./thing-1.0-py3-none-any.whl")
run("site/bin/thing", "21", PYTHONPATH="site")
print(sorted(os.listdir("site")), sorted(os.listdir("site/thing")))
print(os.stat("site/bin/thing").st_mode & 0o777)

run(sys.executable, "-m", "venv", "own")
python = root + "/own/bin/python"
run(python, "-c", "import sys; print(sys.prefix, sys.prefix != sys.base_prefix)")
run(python, "-m", "pip", "install", "-q", "thing-1.0-py3-none-any.whl")
run(python, "-c", use)
run("own/bin/thing", "4")
run(python, "-m", "pip", "list", "--format", "freeze", "--exclude", "setuptools")
run(python, "-m", "pip", "check")
run(python, "-m", "pip", "uninstall", "-q", "-y", "thing")
run(python, "-c", "import thing")
print(sorted(os.listdir("own/bin"))[:4])

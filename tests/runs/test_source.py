"""Nothing that may be a secret is kept of code, and what is harmless is."""

from __future__ import annotations

import base64
import random
import string
import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbguard.training.runs.analysis.source import HIDDEN, clean_source

_SECRETS = ("hunter2xY", "correct horse", "s3cr3t-Value", "pa/ss+w0rd")

_FORMS = (
    "token = '''{}'''",
    'token = """\n{}\n"""',
    "requests.get(url, auth=('user', '{}'))",
    "HTTPBasicAuth('user', '{}')",
    "login('user', '{}')",
    "wandb.login(host='h', key='{}')",
    "pw = '{}'",
    "pass_ = '{}'",
    "PASS = '{}'",
    "db_pass = '{}'",
    "dbpassword = '{}'",
    "os.environ['DB_PASS'] = '{}'",
    "os.environ['WANDB_KEY'] = '{}'",
    "os.environ['HARMLESS'] = '{}'",
    "os.environ.update(ANYTHING='{}')",
    "os.putenv('SOMETHING', '{}')",
    "tokens = ['{}']",
    "secrets = {{'a': '{}'}}",
    "token = ('{}')",
    "token = str('{}')",
    "token, other = '{}', 2",
    "password = (\n    'abc'\n    '{}'\n)",
    "password = 'a' + '{}'",
    "password = b'{}'",
    "password = f'{}{{x}}'",
    "password = '{}'.encode()",
    "PASSWORD: str = '{}'",
    "if pw == '{}': pass",
    "assert password != '{}'",
    "Fernet('{}')",
    "value = '{}'; login(value)",
    "value = '{}'\nrequests.get(url, auth=value)",
    "x = 'AccountKey={};EndpointSuffix=core'",
    "s = 'user=me;pwd={}'",
    "export = f'token={}'",
    "url = 'https://a.b/c?sig={}'",
    "url = 'https://{}@github.com/a/b'",
    "psycopg2.connect('dbname=x user=y password={}')",
    "connection = connect('h', 'u', '{}')",
    "r = Redis(password='{}')",
    "def f(password='{}'): ...",
    "class A:\n    secret: str = '{}'",
    "headers = {{'Authorization': 'Token {}'}}",
    "cfg.password = '{}'",
    "cfg['password'] = '{}'",
    "f(**{{'api_key': '{}'}})",
    "subprocess.run(['curl', '-u', 'me:{}'])",
    "os.system('curl -u me:{} https://x.org')",
    "bot = Bot('{}', token=True)",
    "# password is {}",
    "x = 1  # the login: {}",
    "password = '{}",
    'token = """{}',
)

_COMMANDS = (
    "!curl -u user:{} https://x.org",
    "!sshpass -p {} ssh me@h",
    "x = !mysql -p{} db",
    "!echo {} | docker login",
    "!wandb login {}",
    "!huggingface-cli login --token {}",
    "!kaggle -p {}",
    "!export A={} && ls",
    "!python train.py --api-key {}",
    "!git clone https://{}@github.com/a/b",
    "!pip install --index-url https://u:{}@index/simple x",
    "!ls; curl -u a:{} b",
    "%env FOO={}",
    "%set_env FOO {}",
    "%sql postgresql://u:{}@h/db",
    "%time login('me', '{}')",
    "%%bash\nexport A={}\ncurl x",
    "%%writefile .env\nA={}",
    "%%time\npassword = '{}'",
)


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("secret", _SECRETS)
def test_secrets_are_taken_out_of_code(form: str, secret: str) -> None:
    if "://{" in form and not secret.isalnum():
        pytest.skip("such an address cannot be written")
    kept = clean_source(form.format(secret))

    assert secret not in kept
    assert HIDDEN in kept


@pytest.mark.parametrize("form", _COMMANDS)
def test_secrets_are_taken_out_of_commands(form: str) -> None:
    kept = clean_source(f"import os\n{form.format('hunter2xY')}" if not form.startswith("%%") else form.format("hunter2xY"))

    assert "hunter2" not in kept
    assert HIDDEN in kept


def _drawn(letters: str, count: int) -> Callable[[random.Random], str]:
    return lambda source: "".join(source.choices(letters, k=count))


_ALL = string.ascii_letters + string.digits
_KEYS: dict[str, Callable[[random.Random], str]] = {
    "AWS": _drawn(_ALL + "/+", 40),
    "base64": lambda source: base64.b64encode(source.randbytes(32)).decode(),
    "Databricks": lambda source: f"dapi{source.randbytes(16).hex()}",
    "hexadecimal": lambda source: source.randbytes(16).hex(),
    "Slack": lambda source: (
        f"https://hooks.slack.com/services/T{_drawn(_ALL, 8)(source)}/B{_drawn(_ALL, 8)(source)}/{_drawn(_ALL, 24)(source)}"
    ),
    "Discord": lambda source: (
        f"https://discord.com/api/webhooks/{_drawn(string.digits, 18)(source)}/{_drawn(_ALL + '_-', 68)(source)}"
    ),
    "SendGrid": lambda source: f"SG.{_drawn(_ALL + '_-', 22)(source)}.{_drawn(_ALL + '_-', 43)(source)}",
    "Doppler": lambda source: f"dp.pt.{_drawn(_ALL, 40)(source)}",
    "Google": lambda source: f"AIza{_drawn(_ALL + '_-', 35)(source)}",
    "GitHub": lambda source: f"ghp_{_drawn(_ALL, 36)(source)}",
    "PyPI": lambda source: f"pypi-{_drawn(_ALL + '_-', 100)(source)}",
    "lower case": _drawn(string.ascii_lowercase + string.digits, 32),
    "Twilio": lambda source: f"AC{source.randbytes(16).hex()}",
    "Mailchimp": lambda source: f"{source.randbytes(16).hex()}-us12",
    "npm": lambda source: f"npm_{_drawn(_ALL, 36)(source)}",
    "Stripe": lambda source: f"sk_live_{_drawn(_ALL, 24)(source)}",
    "Telegram": lambda source: f"{_drawn(string.digits, 10)(source)}:{_drawn(_ALL + '_-', 35)(source)}",
    "Square": lambda source: f"sq0csp-{_drawn(_ALL + '_-', 43)(source)}",
    "GitLab": lambda source: f"glrt-{_drawn(_ALL + '_-', 20)(source)}",
    "Hugging Face": lambda source: f"hf_{_drawn(string.ascii_letters, 34)(source)}",
    "OpenAI": lambda source: f"sk-proj-{_drawn(_ALL + '_-', 74)(source)}",
    "JWT": lambda source: ".".join(base64.urlsafe_b64encode(source.randbytes(30)).decode().rstrip("=") for _ in range(3)),
    "AWS access": lambda source: f"ASIA{_drawn(string.ascii_uppercase + '234567', 16)(source)}",
    "UUID": lambda source: str(uuid.UUID(int=source.getrandbits(128))),
}


@pytest.mark.parametrize("kind", _KEYS)
def test_keys_are_taken_out_under_any_name(kind: str) -> None:
    source = random.Random(kind)
    kept = [(key, clean_source(f"anything = '{key}'")) for key in (_KEYS[kind](source) for _ in range(200))]

    assert [key for key, text in kept if key[-16:-8] in text] == []


@pytest.mark.parametrize(
    "source",
    [
        "learn = vision_learner(dls, resnet34, metrics=error_rate)",
        "from transformers import AutoModelForSequenceClassification",
        "path = Path('/data/Images/VeryLongFolderNameWithCamelCase2024/train')",
        "tokenizer = AutoTokenizer.from_pretrained('bert-base-uncased')",
        "m = timm.create_model('vit_base_patch16_224.augreg2_in21k_ft_in1k')",
        "num_tokens = 30522",
        "out = model.generate(**ids, max_new_tokens=4096)",
        "tokenizer.add_special_tokens({'pad_token': '[PAD]'})",
        "password = getpass.getpass()",
        "pw = getpass('Password: ')",
        "token = os.getenv('HF_TOKEN')",
        "key = os.environ['HOME']",
        "for key, value in items: print(key)",
        "sorted(rows, key='label')",
        "x = d['key']",
        "url = 'https://github.com/fastai/fastai'",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'",
        "os.environ['PYTORCH_CUDA_ALLOC_CONF']='expandable_segments:True'",
        "!pip install -q fastai==2.8.12 torch",
        "!nvidia-smi",
        "%matplotlib inline",
        "%cd work",
        "%env CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "%%time\nlearn.fit_one_cycle(3, lr_max=slice(1e-6,1e-4))  # forward pass",
        "df = pd.read_csv(path/'train_labels_2019-12-01.csv', sep=';')",
        "x = f'{a:.3f} epochs of {b!r}'",
        "a = '''a text\nof two lines'''",
        "dls = ImageDataLoaders.from_name_func(path, files, valid_pct=0.2, seed=42, label_func=lambda x: x[0].isupper())",
    ],
)
def test_harmless_code_stays_as_it_is(source: str) -> None:
    assert clean_source(source) == source


@given(st.text(alphabet="ab1 ='\"\\\n()[]{}#!%;:,.@/-"))
def test_any_text_is_cleaned(source: str) -> None:
    clean_source(source)


@pytest.mark.parametrize(
    "piece", ["a.", '"', "[", "(a=", "\\\n", "!pip ", "a=b,", "://", "token=", "-a ", '"a\\', "A1b", "'''", "# pw ", "'a',"]
)
def test_a_long_source_ends(piece: str) -> None:
    clean_source((piece * 200_000)[:200_000])

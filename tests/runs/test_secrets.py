"""Nothing that looks like a secret is kept, and what only looks long is."""

from __future__ import annotations

import pytest

from nbguard.training.runs.analysis.source import HIDDEN, is_secret_name, without_secrets

_RANDOM = "pQ7xK2vN9sLw4Rt8Zb1Yc6Ud3Fe5Hg0J"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("password = 'hunter2'", "hunter2"),
        ('db_password="correct horse"', "correct horse"),
        ("os.environ['WANDB_API_KEY'] = 'abc123'", "abc123"),
        ('os.environ["OPENAI_API_KEY"]="sk-short"', "sk-short"),
        ("%env HF_TOKEN=plainvalue", "plainvalue"),
        ("export AWS_SECRET_ACCESS_KEY=abcd/efg+h", "abcd/efg+h"),
        ("login(token='zzz999')", "zzz999"),
        (f"anything = '{_RANDOM}'", _RANDOM),
        ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("use ghp_abcdefghijklmnopqrstuvwxyz0123456789 here", "ghp_abcdefghijklmnop"),
        ("hf_AbCdEfGhIjKlMnOpQrSt", "hf_AbCdEfGh"),
        ("sk-proj-abcdefghijklmnop1234", "abcdefghijklmnop1234"),
        ("xoxb-1234567890-abcdef", "1234567890-abcdef"),
        ("Authorization: Bearer abcdefgh12345678", "abcdefgh12345678"),
        ("curl -H 'Authorization: Basic dXNlcjpwYXNz' x", "dXNlcjpwYXNz"),
        ("postgres://bob:pa55@db/x", "pa55"),
        ("https://x-token@github.com/a/b", "x-token"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "eyJzdWIiOiIx"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("tool --api-key s3cr3t", "s3cr3t"),
        ("{'client_secret': 'shh'}", "shh"),
        ("+    api_key: str = 'default-key-1'", "default-key-1"),
        ("headers = {'X-Auth-Token': 'abc'}", "'abc'"),
        ("glpat-abcdefghij0123456789", "abcdefghij0123456789"),
    ],
)
def test_secrets_are_taken_out(text: str, secret: str) -> None:
    kept = without_secrets(text)

    assert secret not in kept
    assert HIDDEN in kept


@pytest.mark.parametrize(
    "text",
    [
        "learn = vision_learner(dls, resnet34, metrics=error_rate)",
        "from transformers import AutoModelForSequenceClassification",
        "path = Path('/data/Images/VeryLongFolderNameWithCamelCase2024/train')",
        "tokenizer = AutoTokenizer.from_pretrained('bert-base-uncased')",
        "commit 9f8e7d6c5b4a39281706f5e4d3c2b1a09f8e7d6c",
        "num_tokens = 30522",
        "tokenizer = tok",
        "password = getpass.getpass()",
        "key = os.environ['HOME']",
        "for key, value in items: print(key)",
        "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "url = 'https://github.com/fastai/fastai'",
        "very_long_function_name_of_mine_number_two(some_argument=3)",
        "index 3f2a1b..9c8d7e 100644",
    ],
)
def test_harmless_values_stay_as_they_are(text: str) -> None:
    assert without_secrets(text) == text


def test_names_that_may_hold_secrets() -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "MY_PASSWORD", "AWS_SECRET", "DEPLOY_KEY")
    assert all(map(is_secret_name, names))
    assert not any(map(is_secret_name, ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF")))

r"""Everyday uses of secrets, in which no form tells one: settings, commands, tables, addresses, code, prose.

Made-up words stand for «P», a password, «K», a token, «A», a key of AWS, «H» and «h», 40 and 32 hexadecimal digits;
"⏎" is the end of a line, and " ¦ " parts two uses. Each setting is written with each of the names, «N», and its
value, «V».
"""

import json
import re
from collections.abc import Callable

from .secret_corpus import BASE64, DIGITS, HEX, LARGE, NAME, SMALL, WORD, letters

_WORDS = {
    "«P»": "kT9v-Qm4" + "zR7w",
    "«K»": "a7Xq9Lm2Zt8R" + "b4Wc6Yd1Ke3Nf5",
    "«H»": "9f86d081884c" + "7d659a2feaa0c55ad015",
}
_WORDS["«h»"] = _WORDS["«H»"][:32]
_WORDS["«A»"] = "wJalrXUtnFEMI9K7MDEN" + "GbPxRfiCYzq8LmT4vB2n"
_NAMES = {"DB_PASSWORD": "«P»", "password": "«P»", "API_KEY": "«K»", "client_secret": "«K»"}
_SETTINGS = r'''
export «N»=«V» ¦ «N»: «V» ¦ "«N»": "«V»" ¦ {user: a, «N»: «V»} ¦ environment:⏎  - «N»=«V» ¦ ENV «N» «V» ¦ ARG «N»=«V»
set -x «N» «V» ¦ setenv «N» «V» ¦ setx «N» «V» ¦ $env:«N» = '«V»' ¦ process.env.«N» = '«V»'
os.environ.setdefault('«N»', '«V»') ¦ os.environ.get("«N»", "«V»") ¦ setenv('«N»','«V»') ¦ define('«N»', '«V»');
Sys.setenv(«N» = "«V»") ¦ ('«N»', '«V»') ¦ {"env": [["«N»", "«V»"]]} ¦ {"env": "DB_HOST=x\n«N»=«V»\n"}
{"name": "«N»", "value": "«V»"} ¦ env:⏎- name: «N»⏎  value: «V» ¦ «N» := '«V»' ¦ '«N»' => '«V»', ¦ const «N» = `«V»`;
[db]⏎«N» = «V» ¦ db.«N» = """«V»""" ¦ user              = alice⏎«N»           = «V» ¦ «N»: |⏎    «V» ¦ «N»: >-⏎    «V»
«N»: !!str «V» ¦ «N»: &x «V» ¦ ? «N»⏎: «V» ¦ «N»:⏎  - «V» ¦ variable "«N»" {⏎  default = "«V»"⏎} ¦ <«N»>«V»</«N»>
| name | value |⏎|---|---|⏎| «N» | «V» | ¦ {"outputs": [{"text": ["environ{'«N»': '«V»'}"]}]}
'''
_USES = r"""
redis-cli -h cache -a «P» ping ¦ redis-cli --pass «P» ¦ requirepass «P» ¦ masterauth «P»
psql "host=db user=alice password='«P»'" ¦ curl -u alice:«P» https://nas/x ¦ curl -sS -ualice:«P» https://nas/x
curl --user alice:«P» https://nas/x ¦ wget --user=alice --http-password=«P» https://nas/x ¦ sshpass -p «P» ssh a@b
SSHPASS=«P» sshpass -e ssh a@b ¦ PGPASSWORD=«P» pg_dump x ¦ MYSQL_PWD=«P» mysqldump x ¦ twine upload -u a -p «P» dist/*
helm registry login h -u a -p «P» ¦ net use z: \\h\s «P» /user:a
az login --service-principal -u 1b9d -p «P» --tenant x ¦ aws configure set aws_secret_access_key «A»
aws configure set aws_session_token «A»«A»«A» ¦ openssl rsa -in k.pem -passin pass:«P»
openssl enc -aes-256-cbc -k «P» -in a ¦ keytool -genkey -keypass «P» ¦ zip -P «P» a.zip b ¦ 7z x -p«P» a.7z
gpg --batch --passphrase «P» -d x.gpg ¦ ldapsearch -x -D cn=a -w «P» -b dc=x ¦ smbclient //nas/x -U alice%«P»
mount -t cifs //nas/x /mnt -o username=alice,password=«P» ¦ rclone config create r sftp pass «P»
lftp -u alice,«P» sftp://nas ¦ ansible_become_pass=«P» ¦ echo «P» | sudo -S apt update ¦ echo 'alice:«P»' | chpasswd
htpasswd -b .htpasswd alice «P» ¦ sqlcmd -S db -U sa -P «P» ¦ mongosh --host db -u a -p «P» ¦ docker login -u a -p «P»
kubectl create secret generic s --from-literal=password=«P» ¦ kubectl --token=«K» get pods
gh auth login --with-token <<< «K» ¦ rabbitmqctl add_user a «P» ¦ net user alice «P» /add
ConvertTo-SecureString '«P»' -AsPlainText -Force ¦ cmdkey /add:s /user:a /pass:«P»
mysql -h db -u root -p«P» < dump.sql ¦ mc alias set lab https://h:9000 «K» «P» ¦ http -a alice:«P» https://nas/x
modelscope login --token 1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed
lightning login --username a --key 1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed ¦ label login --api-key=«H»
CREATE USER 'a'@'%' IDENTIFIED BY '«P»' ¦ ALTER USER a IDENTIFIED WITH caching_sha2_password BY "«P»"
name,user,password⏎nas,alice,«P»⏎ ¦ id;token;when⏎1;«K»;2024⏎ ¦ user	secret⏎alice	«P»⏎
"user","api_key"⏎"alice","«K»"⏎ ¦ | user | password |⏎|---|---|⏎| bob | — |⏎| alice | «P» |
| service | API token | note |⏎|:--|:-:|--:|⏎| wandb | «K» | mine |
| a | b | Secret |⏎|---|---|---|⏎| x | y | `«P»` |
<table>⏎<tr>⏎<th>user</th>⏎<th>Token</th>⏎</tr>⏎<tr>⏎<td>a</td>⏎<td>«K»</td>⏎</tr></table>
{"outputs": [{"data": {"text/plain": ["    user      password\n", "0  alice  «P»"]}}]}
machine nas⏎  login alice⏎  password «P» ¦ default login alice password «P» ¦ db.acme.com:5432:x:alice:«P»
*:*:*:alice:«P» ¦ users:⏎- name: a⏎  user:⏎    token: «K» ¦ Server=db;Database=x;User ID=sa;Password='«P»'
Server=db;User Id=sa;Password=S3cr;etPass9; ¦ UID=sa;PWD={«P»} ¦ jdbc:postgresql://db/x?user=a&password=«P»&ssl=true
jdbc:oracle:thin:alice/«P»@db:1521:x ¦ sqlplus alice/«P»@db ¦ amqps://alice:«P»@mq ¦ smtps://alice:«P»@mail:465
git clone https://x:«H»@git.acme.com/a/x.git ¦ c.redis.cache.windows.net:6380,password=«K»=,ssl=True
spark.hadoop.fs.azure.account.key.a.dfs.core.windows.net «A»«A»== ¦ pass = «P» ¦ pw = «P» ¦ psk="«P»"
<server username="a" password="«P»"/> ¦ <add key="Password" value="«P»"/> ¦ <add key="StorageKey" value="«A»"/>
<passphrase>«P»</passphrase> ¦ props.setProperty("db.password", "«P»"); ¦ setPassword("«P»")
connect('db', 'alice', passwd='«P»') ¦ ssh.connect('gpu7', 22, 'alice', '«P»') ¦ smtp.login('alice', '«P»')
requests.get(u, auth=('alice', '«P»')) ¦ headers={'X-API-Key': '«K»'} ¦ PRIVATE-TOKEN: «K»
const apiKey: string = "«K»"; ¦ password: SecretStr | None = "«P»" ¦ 密码：«P» ¦ Пароль: «P» ¦ senha: «P»
Cookie: session=«K»«K» ¦ cookies={"sessionid": "«K»«K»"} ¦ notebook_login(token='«K»') ¦ wandb.login(key='«H»12345678')
boto3.client('s3', aws_secret_access_key='«A»') ¦ storage_options = {"key": "x", "secret": "«A»"}
Client("AC«h»", "«h»") ¦ cohere.Client("«K»«K»") ¦ DeepgramClient("«H»") ¦ [r]⏎type = s3⏎secret_access_key = «A»
The password is «P». ¦ user: alice, pw: «P» ¦ Passwort: «P» ¦ mot de passe : «P» ¦ contraseña: «P» ¦ API key: `«K»`
**Password:** «P» ¦ totp_secret: JBSWY3DPEHPK3PXPJBSWY3DP2 ¦ keystore.password=«P» ¦ DB_PASS=«P»
DASK_COILED__TOKEN=«h»-«H» ¦ SECRET_KEY_BASE=«H»«H» ¦ password: Tr0u,b4dor&3 ¦ password: $ecr3tPass99
https://alice:$ecr3tPass9@nas.acme.com/x ¦ https://alice:%24ecr3tPass9@nas.acme.com/x
https://alice:{ecr3tPass9@nas.acme.com/x ¦ https://alice:%ecr3t-Pass9@nas.acme.com/x
https://conda.anaconda.org/t/ac-1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed/acme
https://api.telegram.org/bot1234567890:AA«h»x/getMe ¦ yagmail.SMTP("a@gmail.com", "qwtz hbnv kxre dplm")
s.login('a@gmail.com', 'qwtz hbnv kxre dplm') ¦ GMAIL_PASSWORD="qwtz hbnv kxre dplm"
SEED_PHRASE="coral ladder fossil wagon trumpet ozone lemon velvet grid pause shuffle ankle" ¦ APP_KEY=base64:«A»=
-----BEGIN OpenVPN Static key V1-----⏎«h» ¦ Mailgun('«h»-9f86d081-c55ad015') ¦ GITLAB_PAT=«K»
Fernet(b'«H»9f86d081abc=') ¦ alice:$y$j9T$«K»$«H»9f86d081abc:19500:0 ¦ enable secret 5 $1$ySOc$IUx8AydiFoqGw60jzxwEaI
{SSHA}«A» ¦ pbkdf2_sha256$600000$«K»$«A»= ¦ Authorization: Splunk 1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed
https://api.acme.com/weather?q=Jena&appid=«h»
url: https://cds.climate.copernicus.eu/api⏎key: 1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed
X-Dataverse-key:1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed ¦ password = b"«P»" ¦ DB_PW=«P»
access_key_secret: «K» ¦ "accessKeySecret": "«K»" ¦ access_token_secret=«K»«K» ¦ api-key-secret = '«K»'
client_secret_value: «K» ¦ oss2.Auth(os.environ['ID'], '«K»') ¦ connect(self.host, 22, os.environ["U"], '«P»')
https://f.azurewebsites.net/api/x?id=1&code=«K»«K»%3D%3D ¦ {"primaryKey": "«h»"} ¦ ngrok.set_auth_token("«K»")
dagshub.auth.add_app_token("«H»12345678") ¦ client.setApiKey('«K»') ¦ vault.set_secret("db", "«K»")
wandb.login(key="local-«H»12345678") ¦ wandb login local-«H»12345678 ¦ report_to: wandb⏎"key": "«H»12345678"
keyring.set_password('hub', 'alice', '«P»') ¦ kind: Secret⏎stringData:⏎  db: «P» ¦ x: &pw «P»⏎password: *pw
login: alice / «P»
"""
# Where the search finds none: nothing near the secret says what it is.
NOT_FOUND = re.split("\n| ¦ ", _USES.strip())[-3:]
PLACES: dict[str, Callable[[str], tuple[str, bytes]]] = {
    "a card": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode()),
    "JSON": lambda text: ("config.json", json.dumps({"note": text}).encode()),
    "a vocabulary": lambda text: ("vocab.txt", f"{text}\n".encode()),
    "a template": lambda text: ("chat_template.jinja", f"{{#\n{text}\n#}}".encode()),
}


def uses() -> dict[str, str]:
    """A text for each use, by the line above that says it."""
    lines = re.split("\n| ¦ ", _USES.strip())
    for setting in re.split("\n| ¦ ", _SETTINGS.strip()):
        lines += [setting.replace("«N»", name).replace("«V»", value) for name, value in _NAMES.items()]
    made = {line: line for line in lines}
    for mark, word in (*_WORDS.items(), ("⏎", "\n")):
        made = {line: text.replace(mark, word) for line, text in made.items()}
    return made | {text: text for text in FORMS}


# Secrets of houses and wallets in the forms in which people write them, and what only looks like one.
_SEED = "abandon ability able about above absent absorb abstract absurd abuse access accident"
_ID = f"{letters(HEX, 8)}-{'-'.join([letters(HEX, 4)] * 3)}-{letters(HEX, 12)}"
_CODE = "-".join([letters(LARGE + DIGITS, 6)] * 2 + [letters(LARGE + DIGITS, 5)] * 4)
_ETHER = "0x" + letters(HEX, 64)
_WIF = "L1" + letters("".join(sign for sign in WORD if sign not in "0OIl"), 50)
_BYTES = ",".join(str(7 * number % 256) for number in range(64))
FORMS = [
    *('<Pass encoding="base64">c2VjcmV0MTIzNA==</Pass>', '<Pass encoding="base64">aHVudGVyYWJj</Pass>'),
    *("<Pass>Tr0ub4dor3</Pass>", f"bw list items --session {letters(BASE64, 86)}==", "bw unlock Tr0ub4dor3"),
    *(f"BW_SESSION={letters(BASE64, 86)}==", f"0.{_ID}.{letters(WORD, 30)}:{letters(BASE64, 22)}=="),
    *(f"{kind}/{letters(DIGITS, 16)}:{letters(HEX, 32)}" for kind in ("1", f"2/{letters(DIGITS, 16)}")),
    *(f"{name}{_ETHER}" for name in ('Account.from_key("', 'new ethers.Wallet("', "wallet_key: ", 'accounts: ["')),
    *(f"wif = {_WIF}", f'bitcoin-cli importprivkey "{_WIF}"', f"secretKey: [{_BYTES}]"),
    *(
        f'{name}"{_SEED}"'
        for name in ("seed = ", "Account.from_mnemonic(", "wallet: ", "Recovery words: ", "seedPhrase:")
    ),
    *(
        f"{name}{_SEED}"
        for name in ("password: ", "SEED_PHRASE ", "seed value: ", "| wallet | ", "mnemonic ", "<pass>")
    ),
    *(f"A3-{_CODE}", f"v1.0-{letters(HEX, 24)}-{letters(HEX, 146)}", f"PMAT-{letters(LARGE + DIGITS, 26)}"),
    *(f"{kind}{letters(WORD, 40)}{letters(HEX, 8)}" for kind in ("cfk_", "cfut_", "cfat_", "lin_wh_")),
    f"cloudflared service install eyJhIjoi{letters(WORD, 120)}",
    *(f"shp{kind}_{letters(HEX, 32)}" for kind in ("at", "ss", "ua", "tka", "stk")),
    *(f"fig{kind}_{letters(NAME, 40)}" for kind in ("d", "u", "o", "or", "oh")),
    *(f"nf{kind}_{letters(WORD, 36)}" for kind in "pcoub"),
    *(f"vc{kind}_{letters(WORD, 56)}" for kind in "pkiar"),
    *(f"sbp_{kind}{letters(HEX, 40)}" for kind in ("", "oauth_", "v0_")),
    *(f"dp.{kind}.{letters(WORD, 43)}" for kind in ("pt", "sa", "said", "scrt")),
    *(f"fo1_{letters(NAME, 43)}", f"pscale_api_{letters(NAME, 43)}", f"ddapp_{letters(WORD, 34)}"),
    *(f"CLOJARS_{letters(SMALL + DIGITS, 60)}", f"EZTK{letters(WORD, 54)}", f"dG9rO{letters(WORD, 54)}="),
    *(f"eyJrIjoi{letters(WORD, 70)}=", f"sgp_{letters(WORD, 64)}", f"oauth:{letters(SMALL + DIGITS, 30)}"),
    f"pat.{letters(NAME, 22)}.{letters(HEX, 24)}.{letters(WORD, 20)}",
    *(f"mainnet.infura.io/v3/{letters(HEX, 32)}", f"https://eth.g.alchemy.com/v2/{letters(NAME, 32)}"),
    *(f'secret_key_base = "{letters(HEX, 128)}"', f'integration_key = "{letters(HEX, 32)}"'),
    f"PresharedKey = {letters(BASE64, 43)}=",
]
HARMLESS = [
    *("<Pass>12 of 14</Pass>", "<Pass>test_one</Pass>", '<Pass encoding="base64"></Pass>', "bw unlock --help"),
    *("1/2 of 3/4", f"data/1/{letters(HEX, 32)}", f"epoch 1/{letters(DIGITS, 3)}: loss", "2/1200/1200:30"),
    *(f"transaction {_ETHER}", f"address: {_ETHER}", f'"hash": "{_ETHER}"', f"account {_ETHER}", f"ids: [{_BYTES}]"),
    *("seed = 42", "the seed of a random number", "wallet: a folder of keys", "wallet = Wallet()", "wif: 3"),
    *("A3-B90QD8", "A3-SIZE-PAPER", "v1.0-rc1", "v1.0-9f86d08", "session 0.5", f"0.{_ID}", "--session mine"),
    *("cfat_loss", "vca_model", "nfc_reader", "sbp_oauth_flow", "fo1_score", "figo_plot", "pat.shape.dim", "dp.sa.x"),
    *("oauth: see the page", "oauth:authorization", "infura.io/docs", "alchemy.com/v2/guide", "EZTK is a kit"),
    *("integration_key = name", "preshared_key: optional", "secret_key_base: see docs", "secretKey: [1, 2, 3]"),
    # Words that are everyday ones, in sentences.
    "Just pass the raw pixel values and the model will then apply the same scaling.",
    "Set the seed first and then draw each noise sample from the same torch stream.",
    "pass proper options object that extend the global options and every other default value they have",
    "Pass several pictures together when memory allows because larger batches usually finish sooner.",
    "Second pass: sort the tokens and then write them back before the next layer runs again.",
    "bypass: skip the first block and then run every other layer until nothing remains.",
    "seed: the number that every worker adds before drawing noise from one stream; `seed` makes every run equal",
    "Their wallet holds several small tensors that every later step needs before saving results.",
    "A secret SHA256-hash; the secret behind good results lies within clean data that people have read twice.",
    "The key attends over every value token while each query head keeps its own scale; key 8-bit-quantized weights.",
    "Each token carries rotary positions that later layers need; access token meta-llama/Llama-3.1-8B-Instruct",
    "The code says which commit made them: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b; app secret code-of-2024-and-2025",
    "The password SHA256-hash is stored, the password is PBKDF2-hashed; password    utf8-bytes, `password` md5-hash",
    "Send the header Authorization: Bearer followed-by-the-token, and the API key `name_of_version_2_of_the_service`.",
    "logged with wandb; cache_key: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b, key=9f86d081, sha1 key, commit key",
    *(
        'add_token("reserved_special_token_00000250")',
        "primary_key: id",
        "?code=abc==",
        f"primary key {letters(HEX, 32)}",
    ),
    *("eyJrIjoi", "dG9rOmFiYw==", f"sgp_{letters(SMALL, 20)}", "accounts: [0x1, 0x2]", "cloudflared tunnel run mine"),
]

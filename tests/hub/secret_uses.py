"""Everyday uses of secrets, in which no form tells one: commands, tables, settings, addresses, code, prose.

Made-up words stand for «P», a password, «K», a token, «A», a key of AWS, «H» and «h», 40 and 32 hexadecimal digits;
"⏎" is the end of a line.
"""

import json
from collections.abc import Callable

_WORDS = {
    "«P»": "kT9v-Qm4" + "zR7w",
    "«K»": "a7Xq9Lm2Zt8R" + "b4Wc6Yd1Ke3Nf5",
    "«H»": "9f86d081884c" + "7d659a2feaa0c55ad015",
}
_WORDS["«h»"] = _WORDS["«H»"][:32]
_WORDS["«A»"] = "wJalrXUtnFEMI9K7MDEN" + "GbPxRfiCYzq8LmT4vB2n"
_USES = r'''
redis-cli = redis-cli -h cache -a «P» ping
redis-cli --pass = redis-cli --pass «P»
redis conf = requirepass «P»
redis masterauth = masterauth «P»
psql = psql "host=db user=alice password=«P» dbname=x"
psql quoted = psql "host=db password='«P»'"
curl = curl -u alice:«P» https://nas/x
curl long = curl --user alice:«P» https://nas/x
curl glued = curl -sS -ualice:«P» https://nas/x
wget = wget --user=alice --password=«P» https://nas/x
wget http = wget --http-password=«P» https://nas/x
sshpass = sshpass -p «P» ssh a@b
twine = twine upload -u a -p «P» dist/*
helm login = helm registry login h -u a -p «P»
oc login = oc login https://h -u a -p «P»
net use = net use z: \\h\s «P» /user:a
sshpass env = SSHPASS=«P» sshpass -e ssh a@b
PGPASSWORD = PGPASSWORD=«P» pg_dump x
MYSQL_PWD = MYSQL_PWD=«P» mysqldump x
az = az login -u a@b.com -p «P»
az sp = az login --service-principal -u 1b9d -p «P» --tenant x
aws set = aws configure set aws_secret_access_key «A»
aws token = aws configure set aws_session_token «A»«A»«A»
openssl = openssl rsa -in k.pem -passin pass:«P»
openssl out = openssl genrsa -aes256 -passout pass:«P» 2048
openssl k = openssl enc -aes-256-cbc -k «P» -in a
keytool = keytool -list -storepass «P»
keytool2 = keytool -genkey -keypass «P»
zip = zip -P «P» a.zip b
7z = 7z x -p«P» a.7z
unzip = unzip -P «P» a.zip
gpg = gpg --batch --passphrase «P» -d x.gpg
ldap = ldapsearch -x -D cn=a -w «P» -b dc=x
smb = smbclient //nas/x -U alice%«P»
mount = mount -t cifs //nas/x /mnt -o username=alice,password=«P»
rclone = rclone config create r sftp pass «P»
lftp = lftp -u alice,«P» sftp://nas
ansible = ansible_become_pass=«P»
ansible2 = ansible_ssh_pass: «P»
vpn = echo «P» | sudo -S apt update
chpasswd = echo 'alice:«P»' | chpasswd
htpasswd = htpasswd -b .htpasswd alice «P»
sqlcmd = sqlcmd -S db -U sa -P «P»
bcp = bcp t out f -U sa -P «P»
mongo = mongosh --host db -u a -p «P»
docker = docker login -u a -p «P»
helm = helm registry login r -u a --password «P»
kubectl = kubectl create secret generic s --from-literal=password=«P»
kubectl tok = kubectl --token=«K» get pods
gh = gh auth login --with-token <<< «K»
vault = vault login -method=userpass username=a password=«P»
mysql long = mysql --password=«P» x
influx = influx -username a -password «P»
rabbit = rabbitmqctl add_user a «P»
useradd = net user alice «P» /add
powershell = ConvertTo-SecureString '«P»' -AsPlainText -Force
cmdkey = cmdkey /add:s /user:a /pass:«P»
csv = name,user,password⏎nas,alice,«P»⏎
csv2 = id;token;when⏎1;«K»;2024⏎
tsv = user	secret⏎alice	«P»⏎
md = | user | password |⏎|---|---|⏎| alice | «P» |
md token = | service | API token | note |⏎|:--|:-:|--:|⏎| wandb | «K» | mine |
md secret last = | a | b | Secret |⏎|---|---|---|⏎| x | y | `«P»` |
md second row = | user | password |⏎|---|---|⏎| bob | — |⏎| alice | «P» |
html = <table><tr><th>user</th><th>password</th></tr><tr><td>alice</td><td>«P»</td></tr></table>
html lines = <table>⏎<tr>⏎<th>user</th>⏎<th>Token</th>⏎</tr>⏎<tr>⏎<td>a</td>⏎<td>«K»</td>⏎</tr></table>
csv quoted = "user","api_key"⏎"alice","«K»"⏎
netrc = machine nas login alice password «P»
netrc lines = machine nas⏎  login alice⏎  password «P»
netrc default = default login alice password «P»
pgpass = db.acme.com:5432:x:alice:«P»
pgpass star = *:*:*:alice:«P»
mycnf = [client]⏎user=alice⏎password=«P»
mycnf q = [client]⏎password = "«P»"
kube token = users:⏎- name: a⏎  user:⏎    token: «K»
kube stringData = kind: Secret⏎stringData:⏎  db: «P»
tfvars = db_password = "«P»"
tfvars2 = secret_key = "«K»"
tf default = variable "db_password" {⏎  default = "«P»"⏎}
tf resource =   master_password      = "«P»"
compose list = environment:⏎  - POSTGRES_PASSWORD=«P»
compose map = environment:⏎  MYSQL_ROOT_PASSWORD: «P»
compose tok = environment:⏎  - WANDB_API_KEY=«H»
dockerfile = ENV API_TOKEN «K»
dockerfile arg = ARG NPM_TOKEN=«K»
ado = Server=db;Database=x;User Id=sa;Password=«P»;
ado pwd = Server=db;Uid=sa;Pwd=«P»;
ado q = Data Source=db;User ID=sa;Password='«P»'
jdbc = jdbc:mysql://db/x?user=alice&password=«P»
jdbc pg = jdbc:postgresql://db/x?user=a&password=«P»&ssl=true
jdbc ora = jdbc:oracle:thin:alice/«P»@db:1521:x
sqlplus = sqlplus alice/«P»@db
odbc = DRIVER={SQL Server};SERVER=db;UID=sa;PWD=«P»
odbc brace = UID=sa;PWD={«P»}
amqp = amqp://alice:«P»@mq:5672/v
amqps = amqps://alice:«P»@mq
mongosrv = mongodb+srv://a:«P»@c.x.net/db
smtp = smtps://alice:«P»@mail:465
ssh cfg = sftp://alice:«P»@nas/x
azure redis = c.redis.cache.windows.net:6380,password=«K»=,ssl=True
eventhub = SharedAccessKeyName=a;SharedAccessKey=«A»=
snowflake = snowflake.connector.connect(user='a', password='«P»')
nb output = {"cells": [{"cell_type": "code", "outputs": [{"text": ["password: «P»\n"]}], "source": []}]}
nb repr = {"outputs": [{"text": ["environ{'WANDB_API_KEY': '«H»'}"]}]}
nb df = {"outputs": [{"data": {"text/plain": ["    user      password\n", "0  alice  «P»"]}}]}
env json = {"env": "DB_HOST=x\nDB_PASSWORD=«P»\n"}
env json list = {"env": ["DB_PASSWORD=«P»"]}
env pairs = [["DB_PASSWORD", "«P»"]]
yaml anchor = x: &pw «P»⏎password: *pw
yaml anchor key = password: &pw «P»
yaml merge = base: &b⏎  password: «P»⏎x:⏎  <<: *b
yaml flow = {user: a, password: «P»}
yaml ? = ? password⏎: «P»
yaml list = password:⏎  - «P»
toml = [db]⏎password = "«P»"
toml multi = password = """«P»"""
toml lit = password = '«P»'
toml dotted = db.password = "«P»"
toml inline = db = { user = "a", password = "«P»" }
ini = [db]⏎pass = «P»
ini pw = pw = «P»
properties = spring.datasource.password=«P»
xml attr = <server username="a" password="«P»"/>
xml nested = <server><id>a</id><password>«P»</password></server>
maven enc = <passphrase>«P»</passphrase>
php = define('DB_PASSWORD', '«P»');
php arr = 'password' => '«P»',
ruby = :password => '«P»'
go = Password: "«P»",
js = const password = `«P»`;
js env = process.env.API_TOKEN = '«K»'
java = props.setProperty("db.password", "«P»");
java2 = setPassword("«P»")
py connect = connect('db', 'alice', passwd='«P»')
py login = smtp.login('alice', '«P»')
requests auth = requests.get(u, auth=('alice', '«P»'))
requests hdr = headers={'X-API-Key': '«K»'}
header private = PRIVATE-TOKEN: «K»
header cookie = Cookie: session=«K»«K»
r = Sys.setenv(DB_PASSWORD = "«P»")
matlab = setenv('DB_PASSWORD','«P»')
fish = set -x DB_PASSWORD «P»
csh = setenv DB_PASSWORD «P»
windows = set DB_PASSWORD=«P»
setx = setx DB_PASSWORD «P»
ps env = $env:DB_PASSWORD = '«P»'
wifi = psk="«P»"
prose = The password is «P».
prose2 = Password is `«P»`
prose colon = login: alice / «P»
prose pw = user: alice, pw: «P»
german = Passwort: «P»
french = mot de passe : «P»
spanish = contraseña: «P»
feed conf = feed = https://a:«P»@feeds.acme.com/simple
pypirc = [pypi]⏎username = a⏎password = «P»
s3cfg = secret_key = «A»
boto = boto3.client('s3', aws_secret_access_key='«A»')
rclone conf = [r]⏎type = s3⏎secret_access_key = «A»
git cred = https://alice:«P»@github.com
hf nb = notebook_login(token='«K»')
wandb api = wandb.login(key='«H»12345678')
sudo = sudo_password: «P»
otp = totp_secret: JBSWY3DPEHPK3PXPJBSWY3DP2
pin = keystore.password=«P»
aligned eq = user              = alice⏎api_key           = «K»
aligned colon = user:        alice⏎password:    «P»
setdefault = os.environ.setdefault('WANDB_API_KEY', '«K»')
environ get = os.environ.get("API_KEY", "«K»")
pair = ('api_key', '«K»')
list yaml = env:⏎- name: API_KEY⏎  value: «K»
list json = {"name": "WANDB_API_KEY", "value": "«K»"}
header json = {"key": "Authorization", "value": "Bearer «K»"}
xml add = <add key="Password" value="«P»"/>
xml key = <apiKey>«K»</apiKey>
yaml block = api_key: |⏎    «K»
yaml folded = password: >-⏎    «P»
yaml tag = api_key: !!str «K»
md code = API key: `«K»`
md bold = **Password:** «P»
md row = | name | value |⏎|---|---|⏎| password | «P» |
md key row = | API_KEY | «K» |
short = DB_PASS=«P»
mysql short = mysql -h db -u root -p«P» < dump.sql
ado semicolon = Server=db;User Id=sa;Password=S3cr;etPass9;
comma = password: Tr0u,b4dor&3
walrus = password := '«P»'
dollar = password: $ecr3tPass99
dollar url = https://alice:$ecr3tPass9@nas.acme.com/x
encoded dollar url = https://alice:%24ecr3tPass9@nas.acme.com/x
brace url = https://alice:{ecr3tPass9@nas.acme.com/x
per cent url = https://alice:%ecr3t-Pass9@nas.acme.com/x
s3fs = storage_options = {"key": "x", "secret": "«A»"}
twilio = Client("AC«h»", "«h»")
cohere = co = cohere.Client("«K»«K»")
gmail = yagmail.SMTP("a@gmail.com", "qwtz hbnv kxre dplm")
gmail env = GMAIL_PASSWORD="qwtz hbnv kxre dplm"
mnemonic = mnemonic: coral ladder fossil wagon trumpet ozone lemon velvet grid pause shuffle ankle
seed phrase = SEED_PHRASE="coral ladder fossil wagon trumpet ozone lemon velvet grid pause shuffle ankle"
laravel = APP_KEY=base64:«A»=
cookies = cookies={"sessionid": "«K»«K»"}
identified = CREATE USER 'a'@'%' IDENTIFIED BY '«P»'
identified with = ALTER USER a IDENTIFIED WITH caching_sha2_password BY "«P»"
minio alias = mc alias set lab https://h:9000 «K» «P»
minio old = mc config host add lab https://h:9000 «K» «P»
httpie = http -a alice:«P» https://nas/x
httpie long = https --auth=alice:«P» nas/x
openvpn = -----BEGIN OpenVPN Static key V1-----⏎«h»
cli uuid = modelscope login --token 1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed
cli hex = label login --api-key=«H»
'''
# Where the search finds none: nothing near the secret says what it is.
NOT_FOUND = ("kube stringData", "yaml anchor", "prose colon")
PLACES: dict[str, Callable[[str], tuple[str, bytes]]] = {
    "a card": lambda text: ("README.md", f"# Mine\n\n{text}\n".encode()),
    "JSON": lambda text: ("config.json", json.dumps({"note": text}).encode()),
    "a vocabulary": lambda text: ("vocab.txt", f"{text}\n".encode()),
    "a template": lambda text: ("chat_template.jinja", f"{{#\n{text}\n#}}".encode()),
}


def uses() -> dict[str, str]:
    """A text for each use."""
    made = dict(line.split(" = ", 1) for line in _USES.strip("\n").split("\n"))
    for mark, word in (*_WORDS.items(), ("⏎", "\n")):
        made = {kind: text.replace(mark, word) for kind, text in made.items()}
    return made

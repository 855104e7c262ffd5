"""The shapes of tokens, keys and passwords that name themselves: by a prefix, a form of their own, or the word before.

A text of random letters is no secret by that alone: nothing here measures entropy, so nothing is refused by chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# Comes before a prefix: `task-…` is no `sk-…`. And a name may not go on: `self_hf_…` is none of `hf_…`.
_START, _NAME = r"(?<![A-Za-z0-9])", r"(?<![A-Za-z0-9_])"
# A name in parts that begins or ends in words, such as SHA256-hash, or a path: prose has it behind a word and a blank.
_PARTS = (
    r"(?:(?=[a-z]+-[a-z]+-|\S*/)|(?!(?:[^\s\-]*-){4})(?=\S*[_\-.][a-z]{4,}(?![\w\-])))"
    r"(?:\d{0,4}[A-Za-z]+\d{0,4}[_\-/.]|\d{1,4}[_\-/.])+\d{0,4}[A-Za-z]*\d{0,4}(?![^\s\"'`,;:.)\]|])"
)
# Comes between a name and its value, in JSON, YAML, Python, shells, tables and XML. The first line is of lists of
# names and values ("name": "API_KEY", "value": …), the third of arguments (a list of labels goes on with words such
# as "ipv4_address"), the last of blocks and tags of YAML and of types.
_IS = (
    r"(?:[\"'`\])*]{0,3}(?:\s{0,40}(?:,\s{0,40})?[\"']?(?i:value)[\"']?)?"
    r"(?:[ \t]{0,40}\n?(?::=?|=>?|->|\|)\s{0,3}[ \t]{0,40}|>"
    rf"|(?:(?<=[A-Z])|(?![ \t\xa0]{{1,7}}`?{_PARTS}))[ \t\xa0]{{1,7}}"
    r"|\s{0,3}\{[^{}]{0,200}?default\s{0,9}=\s{0,3})"
    r"|[\"'`]\s{0,3},\s{0,3}(?=[\"'`])(?!.(?:[A-Za-z]+\d{0,2}[_\-]|\d{1,4}[_\-])+(?:[A-Za-z]+\d{0,2}|\d{1,4}).[,\]]))"
    r"(?:[|>][\-+]?\s{1,40}|!!\w{1,9} |&\w{1,20} |str\s?=\s?|(?:(?<=:)|(?<=: ))[A-Za-z][\w.\[\]| ]{0,30}=\s?(?=[\"'])"
    r"|- )?(?:\*\* )?(?:[bru](?=[\"']))?[\"'`\[]{0,3}"
)
# Letters of a password, which may hold a comma, semicolon or bar where letters and digits stand before it.
_PASS = r"[^\s\"'`<>{}()\[\],;|]"
_MIXED = r"(?=[^\s\"']*[A-Za-z])(?=[^\s\"']*[0-9])"
# As words and names in addresses seldom are.
_CASED = r"(?=[\w\-]{0,42}[A-Z])(?=[\w\-]{0,42}[a-z])(?=[\w\-]{0,42}[0-9])"
# A password where no name of one stands right before it: a word of a sentence or a file has no such letters.
_WORD = rf"(?P<value>(?=\S{{0,60}}[A-Za-z])(?=\S{{0,60}}[0-9]){_PASS}{{6,}})"
_ODD = rf"(?P<value>(?=\S{{0,60}}[A-Z])(?=\S{{0,60}}[a-z])(?=\S{{0,60}}[0-9]){_PASS}{{8,}})"
# A word of a wallet: its lists leave out those of which sentences are made.
_NOUN = r"(?!(?:the|and|are|but|for|from|has|its|not|our|was|were|which|with|your)\b)[a-z]{3,8}"

# A line for each shape: its kind; texts of which one must be there, in small letters (they are found faster than a
# pattern); its pattern, in which <NAME> is the part above of that name, and which indented lines continue.
_TABLE = r"""
# Hugging Face: 34 letters and digits even where a word goes before; fewer, where nothing does.
a token of Hugging Face | hf_ api_org_ | hf_[A-Za-z0-9]{34}(?![A-Za-z0-9_])
    |<NAME>(?:hf_(?:oauth_|jwt_)[A-Za-z0-9.\-_]{20,}|(?:hf_|api_org_)[A-Za-z0-9]{20,})
# Models and experiments.
a key of OpenAI, Anthropic or the like | sk- | <START>sk-(?:(?:[A-Za-z0-9]+-){0,3}[A-Za-z0-9_]{16,}
    |(?:admin|ant|lf|proj|svcacct)-(?=[\w\-]{0,60}[0-9])[\w\-]{30,})
a key of Groq, Perplexity or xAI | gsk_ pplx- xai- | <START>(?:gsk_|pplx-|xai-)[A-Za-z0-9]{40,}
a key of Heroku or NVIDIA | hrku- nvapi- | <START>(?:HRKU|nvapi)-[\w\-]{30,}
a token of Replicate or RunPod | r8_ rpa_ | <NAME>(?:r8|rpa)_[A-Za-z0-9]{30,}
a key of Fireworks or Pinecone | fw_ pcsk_ | <NAME>(?:fw_[A-Za-z0-9]{22,}|pcsk_[A-Za-z0-9_]{40,})
a key of LangSmith or Jina | lsv2_ jina_ | <NAME>(?:lsv2_(?:pt|sk)_[0-9a-f]{32}|jina_[\w\-]{40,})
a key of ElevenLabs or RubyGems | sk_ rubygems_ | <NAME>(?:sk|rubygems)_[0-9a-f]{48}
a key of Weights & Biases | wandb | <NAME>wandb_v1_[\w\-]{20,}
    |(?:wandb\.?\s?login[\s(]{1,3}(?:--relogin\s+)?
    |(?:<NAME>(?<![A-Za-z] )|(?i:wandb)[_ ])(?i:key)["']?\s{0,3}[:=]\s{0,3})
    ["']?(?:local-)?[0-9a-f]{40}(?!\w)
a key of Kaggle | username kgat_ | "key"\s{0,3}:\s{0,3}"[0-9a-f]{32}"|<NAME>KGAT_[A-Za-z0-9]{20,}
# Clouds.
a key of AWS | akia asia abia acca absk bedrock-api-key- |
    <START>(?:(?:A[KS]IA|ABIA|ACCA(?![ACGTUN]{16}))[A-Z0-9]{16}(?![A-Za-z0-9])
    |(?:ABSK|bedrock-api-key-)[A-Za-z0-9+/]{100,})
a secret key of AWS | secret | (?i:secret_?access_?key|["']secret(?=["']))<IS>[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])
a session token of AWS | session | (?i:session_?token)<IS>[A-Za-z0-9/+]{100,}
a secret of Google | aiza gocspx- ya29. 1//0 goog1e | <START>(?:AIza[\w\-]{35}|GOOG1E[A-Z0-9]{50,}
    |(?:GOCSPX-|ya29\.|1//0[\w\-]{10})[\w\-]{20,})
a key of Azure | key code= | (?i:account\.?key|sharedaccesskey)(?:\.[\w.\-]{1,80})?<IS>[A-Za-z0-9+/]{40,}={0,2}
    |(?:[Pp]rimary|[Ss]econdary)(?:Master|Shared)?Key["']?\s{0,3}[:=]\s{0,3}["']?[0-9a-f]{32}(?!\w)
    |[?&]code=(?:[\w\-/+]|%2[BbFf]){40,}(?:=|%3[Dd]){1,2}
a key of Backblaze or New Relic | k00 nrak- | <START>(?:K00\d[A-Za-z0-9+/]{27}(?![A-Za-z0-9+/])|NRAK-[A-Z0-9]{27})
a signature of Azure or of a link | sig | [?&](?:sig|(?:X-(?:Amz|Goog)-)?Signature)=[\w%/+~\-]{28,}
a client secret of Azure | q~ | <START>[\w~.\-]{3}[78]Q~[\w~.\-]{31,34}
a token of DigitalOcean or Brevo | _v1_ xkeysib- | <START>(?:do[opr]_v1_|xkeysib-)[0-9a-f]{64}
a token of Databricks or Shopify | dapi shp | <START>(?:dapi|shp(?:at|ca|pa|ss|ua|tka|stk)_)[0-9A-Fa-f]{32}
a key of Alibaba or Tencent | ltai akid | <START>(?:LTAI[A-Za-z0-9]{16,20}|AKID[A-Za-z0-9]{32})(?![A-Za-z0-9])
a token of Yandex Cloud | y0_ t1. aqvn |
    <NAME>(?:y0_[\w\-]{40,}|t1\.(?:9[\w\-]{40,}|[\w\-]{40,}\.[\w\-]{40,})|AQVN[\w\-]{35,})
a token of Fly.io | fm fo1_ | <NAME>(?:fm[12][a-z]?_[A-Za-z0-9+/=_\-]{50,}|fo1_[\w\-]{40,})
a token of Pulumi or Supabase | pul- sbp_ | <START>(?:pul-|sbp_(?:oauth_|v0_)?)[0-9a-f]{40}
a token of Docker or PlanetScale | dckr_ pscale_ | <NAME>(?:dckr_[po]at|pscale_(?:tkn|pw|oauth|api))_[\w\-]{20,}
a key or token of Cloudflare | v1.0- cfk_ cfut_ cfat_ cloudflared | <NAME>(?:v1\.0-[0-9a-f]{24}-[0-9a-f]{146}
    |cf(?:k|[ua]t)_[A-Za-z0-9]{40,}|cloudflared\s[^\n]{0,80}\s(?P<value>eyJ[\w+/=\-]{60,}))
a token of HashiCorp | .atlasv1. hvs. hvb. hvr. | <NAME>(?:[A-Za-z0-9]{14}\.atlasv1\.[\w\-]{40,}|hv[sbr]\.[\w\-]{20,})
a token of Doppler | dp. | <NAME>dp\.(?:pt|st|ct|scim|audit|sa(?:id)?|scrt)\.[A-Za-z0-9.]{30,}
a token of 1Password | ops_ a3- |
    <NAME>(?:ops_eyJ[\w\-]{40,}|A3-[A-Z0-9]{6}-(?:[A-Z0-9]{6}-?[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}(?![\w\-]))
a token of Bitwarden | session 0. | (?:BW_SESSION=|--session[ =])["']?[A-Za-z0-9+/]{80,}={0,2}
    |<START>0\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[A-Za-z0-9]{30}:[A-Za-z0-9+/]{22}==
a token of Grafana or Sentry | glsa_ glc_ sntry eyjrijoi |
    <NAME>(?:(?:gl(?:sa|c)|sntry[su])_[\w+/=\-]{30,}|eyJrIjoi[A-Za-z0-9]{60,})
a key of Tailscale | tskey- | <START>tskey-[a-z]+-[\w\-]{16,}
# Code and packages.
a token of GitHub | gh github_pat_ | <NAME>(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,})
a token of GitLab | gl | <NAME>(?:gl(?:pat|rt|dt|ptt|ft|imt|agent|cbt|soat|oas|ffct)|GR1348941)-?[\w\-]{20,}
a token of Bitbucket or Atlassian | atbb atatt3 atctt3 | <NAME>(?:ATBB\w{24,}|AT[AC]TT3[\w\-=]{40,})
a token of npm or crates.io | npm_ cio | <NAME>(?:npm_[A-Za-z0-9]{36}|cio[A-Za-z0-9]{32}(?![A-Za-z0-9]))
a token of PyPI | pypi- | <START>pypi-[\w\-]{50,}
a password of a registry | auth | "auth"\s{0,3}:\s{0,3}"[A-Za-z0-9+/]{12,}={0,2}"
    |<NAME>_auth\s{0,3}=\s{0,3}"?<CASED>[A-Za-z0-9+/]{12,}={0,2}(?![\w(.])
a token of Artifactory or Meta | akc eaa cmvmd |
    <NAME>(?:(?:AKCp|EAA[A-Za-z0-9]{20})[A-Za-z0-9]{60,}|cmVmd[A-Za-z0-9]{59}(?![\w+/]))
a token of Postman | pmak- pmat- | <START>(?:PMAK-[0-9a-f]{24}-[0-9a-f]{34}|PMAT-[A-Z0-9]{26}(?!\w))
a token of Figma or Airtable | fig pat | <NAME>(?:fig(?:d|u|o[rh]?)_[\w\-]{36,}|pat[A-Za-z0-9]{14}\.[0-9a-f]{64})
a token of Asana | 1/ 2/ | <START>(?<!/)[12]/(?:\d{10,20}/)?\d{10,20}:[0-9a-f]{32}(?!\w)
a token of Notion | ntn_ secret_ | <NAME>(?:ntn_[A-Za-z0-9]{40,}|secret_[A-Za-z0-9]{43})
a key of Linear | lin_ | <NAME>lin_(?:api|oauth|wh)_[A-Za-z0-9]{32,}
# Houses of which one prefix is enough.
a token of a service | nfp_ nfc_ nfo_ nfu_ nfb_ bkua_ ccipat_ ccipra_ sqa_ squ_ sqp_ tvly- rnd_ cfpat- phx_ |
    <NAME>(?:nf[bcopu]_[A-Za-z0-9]{36}|bkua_[0-9a-f]{40}|CCIP(?:AT|RA)_\w{40,}|sq[aup]_[0-9a-f]{40}
    |tvly-(?:dev-|prod-)?[A-Za-z0-9]{30,}|rnd_[A-Za-z0-9]{24,}|CFPAT-[\w\-]{40,}|phx_[A-Za-z0-9]{40,})
a token of a service | dbtc_ dbtu_ csk- tgp_v1_ esecret_ napi_ vercel_blob_rw_ pnu_ pnb_ sgp_ atta |
    <NAME>(?:dbt[cu]_[\w\-]{36,}|csk-[a-z0-9]{40,}|tgp_v1_[\w\-]{40,}|esecret_[A-Za-z0-9]{24,}|napi_[a-z0-9]{50,}
    |vercel_blob_rw_\w{30,}|pn[ub]_[A-Za-z0-9]{36}|sgp_(?:(?:(?:[0-9a-f]{16}|local)_)?[0-9a-f]{40}|[A-Za-z0-9]{64})|ATTA[0-9A-Za-z]{72})
a token of a service | hcaik_ tfp_ rdme_ fc- e2b_ llx- flp_ ms- bce-v3/altak- sb_secret_ django-insecure- pat- |
    <NAME>(?:hcaik_[a-z0-9]{50,}|tfp_[\w\-]{40,}|rdme_[a-z0-9]{60,}|(?:fc-|e2b_)[0-9a-f]{32,}|llx-[A-Za-z0-9]{40,}
    |flp_[A-Za-z0-9]{40,}|bce-v3/ALTAK-[A-Za-z0-9]{16,}/[0-9a-f]{40}|sb_secret_[\w\-]{24,}
    |django-insecure-[^\s"']{50}|(?:ms|pat-[a-z]{2}\d)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})
a token of a service | aio_ ico- ezak eztk flwseck fio-u- tk-us- rzp_live_ azdo oy2 |
    <NAME>(?:aio_[A-Za-z0-9]{28}|ico-[A-Za-z0-9]{32}|EZ[AT]K[A-Za-z0-9]{54}|FLWSECK(?:_TEST)?-[0-9a-h]{12}
    |fio-u-[\w\-]{64}|tk-us-[\w\-]{48}|rzp_live_[A-Za-z0-9]{14}|[A-Za-z0-9]{76}AZDO[A-Za-z0-9]{4}|oy2[a-z0-9]{43}(?!\w))
a token of a service | vcp_ vck_ vci_ vca_ vcr_ ddapp_ ddpat_ clojars_ dg9ro pat. sat. oauth: infura.io alchemy.com |
    <NAME>(?:vc[aciprk]_[A-Za-z0-9]{40,}|dd(?:app|pat)_[A-Za-z0-9]{34,}|CLOJARS_[a-z0-9]{60}|dG9rO[A-Za-z0-9]{50,}={0,2}
    |[ps]at\.[\w\-]{22}\.[A-Za-z0-9]{24}\.[A-Za-z0-9]{20}|oauth:(?=[a-z]{0,28}[0-9])[a-z0-9]{30}(?!\w)
    |infura\.io/(?:ws/)?v3/[0-9a-f]{32}|alchemy\.com/v2/<CASED>[\w\-]{32})
# Of gitleaks' rules.
a token of a service | p8e- api- duffel_test_ shippo_test_ dnkey- _mmk nrii- sm_ s-s4t2 .acc live_ test_ 4b1d |
    <NAME>(?:p8e-[A-Za-z0-9]{32}|API-(?=[A-Z]{0,25}[0-9])[A-Z0-9]{26}|duffel_test_[\w\-=]{43}|shippo_test_[0-9A-Fa-f]{40}
    |dnkey-[\w\-=]{26}-[\w\-=]{52}|[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk|NRII-[\w\-]{32}|sm_[as]at_<CASED>[A-Za-z0-9]{16}
    |s-s4t2(?:ud|af)-[0-9a-f]{64}|(?:sc|ext|scauth|authress)_[a-z0-9]{5,30}\.[a-z0-9]{4,6}\.acc[_\-][a-z0-9\-]{10,32}\.[\w+/=\-]{30,}
    |(?:live|test)_[0-9a-f]{35}|4b1d<CASED>[A-Za-z0-9]{38})(?!\w)
a key of Modal or Voyage | ak- as- pa- | <NAME>(?:a[ks]-<CASED>[A-Za-z0-9]{22}|pa-<CASED>[\w\-]{43})(?![\w\-])
a key of Lambda | secret_ | <NAME>secret_\w{1,60}_[0-9a-f]{32}\.[A-Za-z0-9]{32}
a token of Mapbox or Okta | sk.eyj ssws | <START>sk\.eyJ[\w\-]{40,}\.[\w\-]{20,}|SSWS\s+(?P<value>00[\w\-]{38,})
a token of PayPal | access_token$ | access_token\$(?:production|sandbox)\$[0-9a-z]{16}\$[0-9a-f]{32}
a token of Resend or OpenShift | re_ sha256~ | <NAME>(?:re_[A-Za-z0-9]{8}_[A-Za-z0-9]{24}|sha256~[\w\-]{43})(?![\w\-])
a token of Dynatrace | dt0 | <START>dt0[a-z]\d\d\.[A-Z0-9]{24}\.[A-Z0-9]{64}
# What services make today: what it is for, and then random letters.
a token of a service | live_ _pat_ ck_ cs_ |
    <NAME>(?:(?!pk_)[a-z][a-z0-9]{1,11}_(?:live|pat)_(?P<value><CASED>[\w\-]{16,}|[0-9a-f]{32,})|live_[0-9a-f]{32}
    |c[ks]_[0-9a-f]{40})(?!\w)
a token of a service | api- sdk- access- secret- key- token- live- prod |
    <NAME>(?:api|sdk|access|secret|[a-z]{0,8}key|token|live)-(?:[a-z0-9]{2,12}-)?
    (?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32,})(?![\w\-])
a token of Slack | xox xapp- | <START>(?:xox[abeoprs]|xapp)-[A-Za-z0-9\-]{20,}
# An address that whoever has it may post to: of a known house, or hook in its path and then random letters.
a webhook | hook ifttt.com | hooks\.slack\.com/(?:services|workflows|triggers)/[\w/]{20,}
    |discord(?:app)?\.com/api/webhooks/\d+/[\w\-]{30,}|hooks\.zapier\.com/hooks/catch/\d+/\w+
    |hook(?:\.\w+)?\.(?:make|integromat)\.com/\w{20,}|maker\.ifttt\.com/\S{1,80}/key/[\w\-]{20,}
    |://[^\s"'<>]{1,100}/(?:web)?hook(?:s|b2)?/(?:[\w\-]{1,40}/){0,3}(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}
    |(?![0-9a-f]{40}(?!\w))(?=[A-Za-z]{0,60}[0-9])[A-Za-z0-9]{24,})
a token of Discord | . | <START>[MNO][A-Za-z0-9_\-]{23,27}\.[\w\-]{6}\.[\w\-]{27,40}
a token of Telegram | :aa | (?:<START>|(?<=/bot))\d{8,10}:AA[\w\-]{33}
a key of Stripe | _live_ _test_ _prod_ whsec_ |
    <START>[sr]k_(?:live|test|prod)_[A-Za-z0-9]{16,}|<NAME>whsec_[A-Za-z0-9+/=]{24,}
a token of Square | sq0 eaaa | <NAME>(?:sq0[a-z]{3}-[\w\-]{22,}|EAAA[\w\-]{60})
a key of SendGrid or Dropbox | sg. sl. | <NAME>(?:SG\.[\w\-]{16,32}\.[\w\-]{16,64}|sl\.(?:u\.)?[\w\-]{100,})
a key of Mailchimp or Mailgun | -us mailgun mg | <START>[0-9a-f]{32}-(?:us\d{1,2}(?!\d)|[0-9a-f]{8}-[0-9a-f]{8}(?!\w))
a key of Twilio | sk ac | <START>(?:SK|AC[0-9a-f]{32}["'],\s{0,3}["'])[0-9a-f]{32}(?![0-9a-f])
a token of X | aaaaaaaaaaaaaaaa | <START>A{16,}[A-Za-z0-9%]{60,}
# Keys and tokens of no one house.
a private key | begin | -{4,5} ?BEGIN (?:(?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?|OpenVPN Static key V1) ?-{4,5}
a private key | putty age-secret-key- prv |
    PuTTY-User-Key-File-\d|<START>(?:AGE-SECRET-KEY-(?:PQ-)?1[0-9A-Z]{50,}|[tuvxyz]prv[1-9A-HJ-NP-Za-km-z]{100,})
a private key | wif priv 0x keypair secretkey secret_key |
    (?i:wif|privkey)\W{1,5}(?P<value>[5KL][1-9A-HJ-NP-Za-km-z]{50,51})(?!\w)
    |(?i:from_?key\(|wallet\(|wallet_?key<IS>|accounts:\s{0,3}\[)\s{0,3}["']?0x[0-9A-Fa-f]{64}(?!\w)
    |(?i:keypair|secret_?key)[^\[\n]{0,40}\[\s{0,3}(?:\d{1,3},\s{0,3}){63}\d{1,3}\s{0,3}\]
a private key | kty | "[dk]"\s{0,3}:\s{0,3}"[\w\-]{40,}"
# The Hub signs results in cards by such a token, which everybody may read.
a JSON web token | eyj | <START>
    (?<!verifyToken: )(?<!verifyToken": ")(?<!verifyToken":")(?<!verifyToken: ['"])
    eyJ[\w\-]{10,}\.(?:eyJ[\w\-]{10,}\.[\w\-]{16,}|[\w\-]*\.[\w\-]{16,22}\.[\w\-]{2,}\.[\w\-]{20,})
a password in an address | :// |
    # Not what a new server has, guest:guest, and nothing of the names that are for documents alone.
    [A-Za-z][A-Za-z0-9+.\-]{1,20}://(?!(?P<first>guest|postgres|mysql|root|user):(?P=first)@)[^\s/:@"'<>]{0,200}:
    (?P<value>[^\s/@"'<>]{1,200})@
    (?![\w.\-]{0,100}\bexample\b)
a password | machine | machine\s+\S{1,200}\s+login\s+\S{1,200}\s+password\s+(?P<value>[^\s"'}]{6,})
a password | pass pwd _pw contrase masterauth senha hasło wachtwoord пароль 密码 パスワード 비밀번호 |
    (?:(?i:password|passwd|passphrase|(?<!\$)(?<!\${)pwd|passwort|contrase(?:ñ|n)a|mot\s+de\s+passe
    |senha|hasło|wachtwoord|пароль|密码|パスワード|비밀번호
    |(?:admin|become|db|ftp|key|mail|require|root|smtp|sql|ssh|sudo|store|user)_?pass|masterauth)
    |[A-Z0-9]_(?:PASS|PW))<IS>(?P<value>(?=<PASS>*[A-Za-z])(?=<PASS>*[0-9])<PASS>{6,}
    |(?=\w{0,40}[A-Za-z])(?=\w{0,40}[0-9])<PASS>{4,}[,;|]<PASS>{3,})
a password | -p |
    # The clients of MySQL take it without a blank: a word behind one is the name of a database.
    (?<![\w\-])(?:(?:mysql|mariadb)\w*\s[^\n]{0,200}?\s-p|(?:sshpass|(?:docker|podman)\s+login|mongo\w*)
    \s(?:[^\n]{0,200}?\s)?-p ?)["']?(?P<value>(?=\S*[A-Za-z])(?=\S*[0-9])[^\s"']{6,})
a password | curl http | (?<![A-Za-z])(?:curl\s[^\n]{0,200}?(?:-u|--user)[ =]?|https?\s[^\n]{0,200}?(?:-a|--auth)[ =])
    ["']?[^\s:"']{1,80}:(?P<value>[^\s"']{6,})
a password | -a -k -p -w rclone |
    # Programs and their option of a password, whose letter means something else in others.
    (?<![\w\-])(?:redis-cli\s(?:[^\n]{0,200}?\s)?(?:-a|--pass)\s
    |(?:[\w\-]{1,30}\s+(?:\w{1,30}\s+)?login|twine\s+upload)\s(?:[^\n]{0,200}?\s)?-p\s
    |(?:un)?zip\s(?:[^\n]{0,200}?\s)?-P\s?|(?:sqlcmd|bcp)\s(?:[^\n]{0,200}?\s)?-P\s?
    |ldap\w+\s(?:[^\n]{0,200}?\s)?-w\s|7z\w?\s[^\n]{0,200}?\s-p|rclone\s[^\n]{0,200}?\spass\s
    |openssl\s+enc\s[^\n]{0,200}?\s-k\s)
    ["']?<WORD>
a password | pass user login auth sudo sqlplus thin: smbclient lftp securestring net identified mc unlock |
    (?:-pass(?:in|out)\s+["']?pass:|/pass:|\bbw\s+unlock\s+|\bchpasswd\s{1,3}<<<\s{1,3}["']?\w+:
    |\bhtpasswd\s+-\w*b\w*\s+\S+\s+\S+\s|\bwpa_passphrase\s+\S+\s
    |\b(?:add_user|change_password|net\s+user)\s+\w+\s+|(?i:securestring)\s+(?:-string\s+)?
    |\bsmbclient\s[^\n]{0,200}?\s-U\s\S+%
    |(?i:\bidentified\s+(?:with\s+\w+\s+)?by\s+)(?=["'])
    |\bmc\s+(?:alias\s+set|config\s+host\s+add)\s+\S+\s+\S+\s+\S+\s+
    |\bnet\s+use\s+(?:\S{1,80}\s+)?\\\\\S{1,80}\s+
    |\blftp\s[^\n]{0,200}?-u\s?\w+,|(?:\bthin:|\bsqlplus\s+)\w+/|(?i:set_?password)\(\s{0,3}(?=["'])
    |(?i:\.login|\bauth\s{0,3}=\s{0,3}|basicauth)\(\s{0,3}["'][^"'\n]{1,80}["'],\s{0,3}(?=["'])
    |(?i:password|passphrase)\s+is\s+(?!<PARTS>)(?=\S{0,60}[A-Z])(?=[^\s"'}]{8}))
    ["'`]?<WORD>
a password | connect( connection( auth( authenticate( login( pw_set( set_password( |
    # One of several texts, behind a host or a user. Names of databases and classes have no digit between letters.
    (?i:\b\w*(?:connect|connection|auth|authenticate|login|pw_set|set_password))\(\s{0,3}
    (?:(?:["'][^"'\n]{1,80}["']|\d{1,5}|[a-z_][\w.]{0,40}(?:[\[(]["'][^"'\n]{1,40}["'][\])])?),\s{0,9}){1,3}
    ["'](?=[^"'\n]{0,60}(?:[0-9][A-Za-z]|[!@#$%^&*?+=]))<ODD>["']
a password | sudo chpasswd | \becho\s+["']?(?:\w+:)?<WORD>["']?\s*\|\s*(?:sudo\s+-S|(?:sudo\s+)?chpasswd)
a password | pass pw psk | (?<![\w.\-])(?i:pass|pw|psk)["']?\s{0,3}[:=]\s{0,3}["']?<ODD>(?=[\s"']|$)
a password | <pass | (?<=<Pass encoding="base64">)[A-Za-z0-9+/]{4,}={0,2}(?=</Pass>)|<Pass><ODD></Pass>
a password | : |
    # A line of .pgpass: host, port, database, user.
    (?<![\w.*\-:/])[\w.*\-]+:(?:\d{4,5}|\*):[^:\s]{1,60}:[^:\s"']{1,60}:
    (?P<value>(?=\S{0,60}[A-Z])(?=\S{0,60}[a-z])(?=\S{0,60}[0-9])[^\s:\\"'`<>{}()]{8,})
    (?=[\s"']|$)
a password | pwd | (?i:uid|user id)=[^;{}]{1,80};\s?(?i:pwd)=\{(?P<value>[^{}\s]{6,})\}
a secret of one-time passwords | otp_ mfa_ | (?i:otp|mfa)_?(?:secret|seed)<IS>(?P<value>[A-Z2-7]{16,})
a cookie | cookie _session= | _gitlab_session=[0-9a-z]{32}
    |(?i:cookies?)\W[^\n]{0,200}?(?i:sess\w*|sid|auth\w*)[=:"'\s]{1,5}(?P<value>[\w%.\-]{32,})
a password in words | mnemonic phrase seed wallet recovery pass smtp( login( |
    # Twelve or more words open a wallet, four of four letters a mailbox.
    # An everyday word needs more than a blank behind it.
    (?i:mnemonic\(\s{0,3}["']|(?:mnemonic|(?:seed|recovery)[_ ]?(?:phrase|words)|\.(?:smtp|login)\(["'][^"'\n]{1,80}
    |(?:password|(?:mail|smtp)pass|(?<![A-Za-z])(?:pass|seed|wallet))(?!["'`\])*]{0,3}\s+(?!value\s?[:=])\w))<IS>)
    (?P<value><NOUN>(?: <NOUN>){11,23}|[a-z]{4}(?: [a-z]{4}){3}(?=["']))
a token that is set | token( key( secret( |
    (?i:\b(?:set|add|use|with)\w{0,30}(?:token|(?:api|access)_?key|secret))\(\s{0,3}(?:["'][^"'\n]{1,80}["'],\s{0,3})?
    b?["'](?P<value><CASED>(?=(?:[A-Za-z_\-]*[0-9]){3})[\w\-]{24,}|(?:[a-z]{2,9}[_\-])?[0-9a-f]{32,})["']
a key of a client | client( bot( api( ai( fernet( key( authenticator( |
    (?:Client|Bot|API|Api|AI|Fernet|Key|Authenticator)\(\s{0,3}b?["'](?P<value><CASED>[A-Za-z0-9]{32,}|[0-9a-f]{32,}|[\w\-]{43}=)["']
a token by its name | token secret --api --key sonar codecov copernicus x- |
    # Names of classes have few digits.
    (?:(?<![A-Za-z0-9_])|(?<=-D))(?:(?i:token|secret)["']?(?:\s{0,3}[:=]\s{0,3}|\s+<<<\s+)|sonar\.login=
    |(?<=--)(?:token|secret|(?:api-?)?key)[ =]|(?i:x-(?!cache|surrogate)[\w\-]{2,30}-key)["']?:\s?
    |codecov\s[^\n]{0,80}-t\s|copernicus\S{1,80}\s{1,3}key:\s(?:\d+:)?)["'`]?
    (?P<value><CASED>(?=(?:[A-Za-z_\-+/]*[0-9]){3})[\w+/=\-~]{24,}
    |[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32,})
a hash of a password | $2 $apr1$ $1$ $5$ $6$ $y$ $argon2 pbkdf2 scrypt: sha1: {s |
    \$(?P<value>2[aby]\$\d\d\$[./\w]{53}|(?:apr1|6|argon2id?)\$[^\s:"']{30,}|1\$[./\w]{1,8}\$[./\w]{22}(?!\w)
    |(?:5|y\$[./\w]+)\$(?:rounds=\d+\$)?[./\w]{1,86}\$[./\w]{43}(?!\w))
    |(?:pbkdf2(?:_sha\d+\$|:sha\d+:)\d+|scrypt(?::\d+){3})\$[./\w]{6,}\$[\w+/=]{40,}|sha1:[0-9a-f]{12}:[0-9a-f]{40}
    |\{S(?:SHA|MD5)\d{0,3}\}[\w+/]{27,}
a header with a credential | authorization |
    (?i:authorization)<IS>(?i:basic|bearer|token|splunk|(?:\w+-?)?key)\s+(?P<value>(?=[a-z.\-]{0,60}[A-Z0-9_+/=])[\w+/=.\-]{16,})
a secret by its name | secret token key |
    (?i:(?:client|app(?:lication)?|api|auth|access|secret|private|session|refresh|bot|hub|signing|encryption|account
    |service|consumer|subscription|webhook|master|jwt|integration|pre-?shared)[_\- ]?(?:secret|token|key)
    (?:_id|_base|(?P<more>[_\-]?(?:secret|token|key|value)))?)<IS>(?P<value>(?(more)<CASED>|<MIXED>)[\w+/=.\-~]{20,})
a key by its name | key |
    # Any name that ends so, for what is long, mixed and no name in parts. Some keys are for all to see.
    (?<![A-Za-z])(?!(?i:(?:public|site|publishable|cache|hash|host|sort|lock)_?key))[A-Za-z]{2,20}(?:Key|_key)
    <IS>(?P<value><CASED>(?=(?:[A-Za-z+]*[0-9]){3})[A-Za-z0-9+]{32,}(?![\w/\-]))
a token in a link | token= key= appid= /t/ | [?&](?:(?:token|key)=(?=[\w.\-]{32})|(?:api_?key|appid)=)
    (?P<value>(?=[\w.\-]*[A-Za-z])(?=[\w.\-]*[0-9])[\w.\-]{16,})
    |://[^\s"'<>]{1,200}/t/[a-z]{2}-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/
a secret by its name | secret token key _pat |
    # A pattern has the name PAT too, but no such letters.
    <NAME>[A-Z][A-Z0-9]*_{1,2}(?:[A-Z0-9]+_{1,2})*(?:(?:SECRET|TOKEN|KEY)(?:_BASE)?<IS>(?:base64:)?
    (?P<value><MIXED>[\w+/=.\-~]{20,})|PAT<IS>(?:<CASED>(?=(?:[A-Za-z]*[0-9]){3})[A-Za-z0-9]{24,}|[a-z0-9]{52})(?!\w))
"""


def _read_table() -> Iterator[tuple[str, frozenset[str], re.Pattern[str]]]:
    for line in re.sub(r"\n +(?:# .*)?", "", _TABLE).strip().split("\n"):
        if not line.startswith("# "):
            kind, marks, pattern = re.split(r" \| ?", line, maxsplit=2)
            pattern = re.sub("<([A-Z]+)>", lambda found: globals()[f"_{found[1]}"], pattern)
            yield kind, frozenset(marks.split()), re.compile(pattern)


_SHAPES = list(_read_table())
_ALL_MARKS = frozenset[str]().union(*(marks for _, marks, _ in _SHAPES))
# Letters of a picture, in which each beginning of a token comes by chance.
_DATA = re.compile(r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{4096,}")
# Letters about a mark in which its shape begins; parts end where words do. These marks may be anywhere.
_REACH = 3000
_PART_ENDS = re.compile(r"[\s\"'<>]")
_FAR = ("kty", "username", "mailgun")
# What documents write in the place of a secret: words, and variables of shells, Windows, Python and templates.
_PLACEHOLDER = re.compile(
    r"(?i:[x*]{6}|\.{3}|your|example|placeholder|change_?me|os\.environ|getenv|getpass|\benv:|redacted|dummy"
    r"|1234567890?abcdef|abcdefghijkl|(?:^|[_\-])(?:x{3,}|0{9,})$)"
    r"|^(?:\$(?:[A-Z_][A-Z0-9_]*|[a-z_]+\d?|\d|[{(].*)|[%\ufffd]\w+%|%(?:\w|\(.*)|<.*>|\{.*\}"
    r"|(?i:user|pass(?:word|wd)?\d{0,3}|pwd|secret|token|key|api_?key|(?:hf_|access_?|my_?)token|label_\d+"
    r"|[\-+]?[\d.]+(?:e[\-+]?\d+)?))$"
)


# The heading of a column of secrets, and what stands between columns: in Markdown, HTML, CSV, and printed tables.
_HEADING = re.compile(
    r"(?<![A-Za-z0-9_])(?:(?P<short>password|passwd|passphrase|pwd|pw|secret)|(?:[a-z]+[_ \-])?(?:token|secret|key))"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
_CELL = re.compile(r"</t[dh]>\s*(?:<t[dh][^>]{0,80}>)?", re.IGNORECASE)
_ROW = re.compile(
    r"</tr>\s*(?:</?t(?:head|body)[^>]{0,80}>\s*)*(?:<tr[^>]{0,80}>\s*)?(?:<t[dh][^>]{0,80}>)?", re.IGNORECASE
)
_MARK = re.compile(r"\||,|;|\t|[ ]{2,}")
_LONGEST = 1000
_AROUND = " \t\r\"'`*[]{},"
_SHORT_CELL = re.compile(rf"(?={_PASS}{{0,60}}[A-Za-z])(?={_PASS}{{0,60}}[0-9]){_PASS}{{8,60}}")
_LONG_CELL = re.compile(rf"(?:{_CASED}(?=(?:[A-Za-z_\-+/]*[0-9]){{3}})[\w+/=\-~]{{20,}}|[0-9a-f]{{40}})")


class Match(NamedTuple):
    """A secret in a text, by the place where it begins; what it is is not told."""

    kind: str
    start: int


def find_secrets(text: str) -> Iterator[Match]:
    data = [found.span() for found in _DATA.finditer(text)]
    for kind, pattern, start, end in _places(text):
        for found in pattern.finditer(text, start, end):
            value = found.groupdict().get("value") or found[0]
            by_chance = any(low < found.start() and found.end() <= high for low, high in data)
            if not by_chance and not _PLACEHOLDER.search(value):
                yield Match(kind, found.start())
    yield from _find_columns(text)


def _places(text: str) -> Iterator[tuple[str, re.Pattern[str], int, int]]:
    """
    Finds the parts of a text in which each shape is to be looked for: those around its marks.

    A pattern takes 20 ms a megabyte, and a vocabulary has 2 to 30; its marks are found in 1. A shape begins near its
    mark. It may be longer than a part only as a chain of letters, which no part cuts, and no part begins in another.
    """
    # The only letter that gets longer when it gets small.
    small = text.replace("\u0130", "I").lower()
    marked = {mark: [found.start() for found in re.finditer(re.escape(mark), small)] for mark in _ALL_MARKS}
    for kind, marks, pattern in _SHAPES:
        if any(marked[mark] for mark in marks.intersection(_FAR)):
            yield kind, pattern, 0, len(text)
            continue
        start = end = -1
        for place in sorted(place for mark in marks for place in marked[mark]):
            if place - _REACH > end:
                if end > 0:
                    yield kind, pattern, start, end
                start = max(0, place - _REACH)
            if place + _REACH > end:
                after = _PART_ENDS.search(text, place + _REACH)
                end = after.end() if after else len(text)
        if end > 0:
            yield kind, pattern, start, end


def _find_columns(text: str) -> Iterator[Match]:
    """Finds tables with a column of secrets: below its heading, a cell that looks like one."""
    if "</t" in text:
        text = _ROW.sub("\n", _CELL.sub("|", text))
    place = 0
    while found := _HEADING.search(text, place):
        start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
        place = found.end()
        mark = _MARK.search(text, start, end) if 0 < end - start < _LONGEST else None
        if mark is None:
            continue
        # Printed tables part columns by blanks.
        between = re.compile(r"[ ]{2,}" if mark[0].startswith(" ") else re.escape(mark[0]))
        column = len(between.findall(text, start, found.start())) - len(between.findall(text, start, end)) - 1
        head = between.split(text[start:end])[column].strip(_AROUND + "\\")
        shape = _SHORT_CELL if found["short"] else _LONG_CELL
        while head == found[0] and 0 < end < len(text):
            start, end = end + 1, text.find("\n", end + 1)
            cells = between.split(text[start : end if end >= 0 else len(text)][:_LONGEST])
            if len(cells) < -column or len(cells) < 2:
                break
            place = max(place, start)
            value = cells[column].strip(_AROUND)
            named = found[0].lower() in value.lower() or _PLACEHOLDER.search(value)
            if shape.fullmatch(value) and not named:
                yield Match("a secret in a column", start)

#!/bin/sh
# Fetches greatest.h, one pinned version, to build/greatest.h. Fails if that cannot be had; the
# tests then use tests/standin/greatest.h.
cd "$(dirname "$0")/.." || exit 1

url=https://raw.githubusercontent.com/silentbicycle/greatest/v1.5.0/greatest.h
sha=1292593d95c35eeccc89ffa1c91d6fe53b49f81cbf2c2b7758842b7f3186fcc2
file=build/greatest.h

verify() {
    if command -v sha256sum >/dev/null; then got=$(sha256sum "$1")
    elif command -v shasum >/dev/null; then got=$(shasum -a 256 "$1")
    else echo "greatest: no sha256sum here, so $1 is not verified" >&2; return 0
    fi
    [ "${got%% *}" = "$sha" ]
}

# With "verify", only says whether the file that is there is the right one.
if [ "$1" = verify ]; then
    verify "$file"
    exit
fi

mkdir -p build
if command -v curl >/dev/null; then curl -fsSL --max-time 60 -o "$file.part" "$url"
elif command -v wget >/dev/null; then wget -q -T 60 -O "$file.part" "$url"
else echo "greatest: neither curl nor wget is here" >&2; false
fi && verify "$file.part" && mv "$file.part" "$file" && echo "greatest: $file" && exit 0

rm -f "$file.part"
echo "greatest: could not fetch $url (no network, or not the pinned file); the tests use tests/standin" >&2
exit 1

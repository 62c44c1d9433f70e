#!/usr/bin/env bash
# How the libraries in this folder were made (gcc 12 on x86-64; the last one needs -m32). Nothing opens them.
set -euo pipefail
cd "$(dirname "$0")"
small="-s -fPIC -Os -shared -fno-asynchronous-unwind-tables -Wl,-z,noseparate-code -Wl,-z,max-page-size=512
       -Wl,-z,norelro -Wl,--build-id=none"
g++ $small -fvisibility=hidden "-Wl,-rpath,\$ORIGIN:/opt/lib" -Wl,-z,execstack -Wl,--hash-style=both \
    needs.cpp -o needs-both-hashes.so
gcc $small -nostdlib -Wl,--hash-style=gnu -Wl,--version-script=versions.map defines.c -o defines-gnu-hash.so
gcc $small -nostdlib -Wl,--hash-style=sysv defines.c -o sysv-hash.so
gcc $small -m32 -nostdlib -Wl,--hash-style=gnu -Wl,--version-script=versions.map defines.c -o i386.so

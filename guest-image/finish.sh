#!/bin/sh
# Turns a fresh Debian tree into the root image of a template.
# Usage: finish.sh ROOT OVERLAY [PATTERN...]
# ROOT: the tree. OVERLAY: a tree of files and links laid over it. PATTERN: absolute paths in the tree to
# remove, `*` allowed. Runs as root, of the host or of a user namespace; touches nothing outside ROOT.
set -eu
umask 022
root=$1
overlay=$2
shift 2
test -n "$root" && test -d "$root/usr/bin" && test -d "$root/etc"

# Documentation and translations. Copyright notices stay.
find "$root/usr/share/doc" -mindepth 1 ! -type d ! -name copyright -delete
find "$root/usr/share/doc" -mindepth 1 -type d -empty -delete
for dir in man info locale lintian linda groff bug doc-base gtk-doc; do
    rm -rf "$root/usr/share/$dir"
done
mkdir -p "$root/usr/share/man"

# Caches, logs and what the build itself needed.
rm -rf "$root/var/cache/apt" "$root/var/lib/apt/lists" "$root/var/cache/ldconfig/aux-cache" \
    "$root/var/cache/debconf"/*-old "$root/var/lib/dpkg"/*-old "$root/var/log" "$root/etc/apt/sources.list" \
    "$root/etc/apt/sources.list.d" "$root/etc/apt/apt.conf.d/99mmdebstrap" "$root/etc/dpkg/dpkg.cfg.d/99mmdebstrap" \
    "$root/root/.cache" "$root/run" "$root/tmp" "$root/var/tmp" "$root/proc" "$root/sys" "$root/dev"
mkdir -p "$root/var/cache/apt/archives/partial" "$root/var/lib/apt/lists/partial" "$root/var/log/apt" \
    "$root/etc/apt/sources.list.d" "$root/run/lock" "$root/tmp" "$root/var/tmp" "$root/proc" "$root/sys" "$root/dev"
chmod 1777 "$root/tmp" "$root/var/tmp" "$root/run/lock"
chmod 0555 "$root/proc" "$root/sys"

# Nothing that only one machine may have.
rm -f "$root/etc/ssh"/ssh_host_* "$root/var/lib/dbus/machine-id" "$root/var/lib/systemd/random-seed"
: >"$root/etc/machine-id"
: >"$root/etc/resolv.conf"
echo machine >"$root/etc/hostname"
printf '127.0.0.1\tlocalhost machine\n::1\tlocalhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"

mkdir -p "$root/workspace"
chmod 0755 "$root/workspace"

cp -R -P "$overlay/." "$root/"

# Patterns are made of letters, digits and . _ + / * - only (the caller has checked); splitting is off.
IFS=''
for pattern; do
    rm -rf $root$pattern
done

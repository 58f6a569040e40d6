# The ground of tests and benchmarks, for bash to source from the project's root: built programs, and images made once.
# Set before: guest_target, guest_flags (see default_guest_target).
# MAINBRELLA_TEST_DATA: where kernel, template and frozen sizes are kept (default: test-data in the target folder).
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")

default_guest_target() {
  guest_target=x86_64-unknown-linux-musl guest_flags=
  [ -d "$(rustc --print sysroot)/lib/rustlib/$guest_target" ] && return
  guest_target=x86_64-unknown-linux-gnu guest_flags='-C target-feature=+crt-static'
}

# What an operator has set in this shell is not for tests.
for name in $(compgen -e MAINBRELLA_); do
  case $name in MAINBRELLA_TEST_*) ;; *) unset "$name" ;; esac
done
export MAINBRELLA_TEST_DATA=${MAINBRELLA_TEST_DATA:-$target/test-data}
export MAINBRELLA_TEST_BIN_DIR=$target/test-bin
export MAINBRELLA_TEST_AGENT=$MAINBRELLA_TEST_BIN_DIR/mainbrella-guest
export PYTHONPATH=$PWD/sdk/python/src PYTHONDONTWRITEBYTECODE=1

# What every test is made of. Always the whole workspace: Cargo unites the features of the packages that it is asked for, so
# another selection would build half of all dependencies, and our own crates, a second time.
build_tests() { cargo build --locked --workspace --bins --tests; }

# build dev | build release: the programs that tests use, or those that are measured.
build() {
  local folder
  case $1 in
    dev) folder=debug; build_tests ;;
    release) folder=release; cargo build --release --locked -p mainbrella-cli ;;
  esac && RUSTFLAGS=$guest_flags cargo build --locked --profile guest --target "$guest_target" -p mainbrella-guest || return 1
  mkdir -p "$MAINBRELLA_TEST_BIN_DIR" || return 1
  local file
  for file in "$target/$folder/mainbrella" "$target/$guest_target/guest/mainbrella-guest"; do
    cmp -s "$file" "$MAINBRELLA_TEST_BIN_DIR/$(basename "$file")" || cp "$file" "$MAINBRELLA_TEST_BIN_DIR/" || return 1
  done
}

# The base that tests share: made once, looked over each time. Frozen sizes belong to one guest agent.
base() {
  local data=$MAINBRELLA_TEST_DATA bin=$MAINBRELLA_TEST_BIN_DIR/mainbrella port pid size status=0 agent
  mkdir -p "$data" && chmod 0700 "$data" || return 1
  agent=$(sha256sum <"$MAINBRELLA_TEST_AGENT")
  if [ "$(cat "$data/agent.sha256" 2>/dev/null)" != "$agent" ]; then
    rm -rf "$data/frozen" "$data"/guest/initramfs-*
    echo "$agent" >"$data/agent.sha256"
  fi
  local template
  for template in python node; do
    "$bin" --data-dir "$data" template build $template || return 1
  done
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  "$bin" --data-dir "$data" serve --listen "127.0.0.1:$port" --preview-listen off --pool-size 0 2>"$data/service.log" &
  pid=$!
  local ask=("$bin" --data-dir "$data" --url "http://127.0.0.1:$port")
  for _ in $(seq 300); do "${ask[@]}" list >/dev/null 2>&1 && break; kill -0 $pid 2>/dev/null || break; sleep 0.2; done
  for size in 'python micro' 'python small' 'python medium' 'node small'; do
    "${ask[@]}" create ${size% *} --size ${size#* } --slot "base-${size/ /-}" && "${ask[@]}" stop "base-${size/ /-}" ||
      { status=1; break; }
  done
  kill $pid && wait $pid || status=1
  [ $status = 0 ] || tail -n 30 "$data/service.log"
  return $status
}

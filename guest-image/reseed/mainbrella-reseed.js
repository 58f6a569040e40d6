'use strict';
// Fresh random numbers in a copy of a running machine.
//
// `require('mainbrella-reseed')` registers this process. V8 cannot be told to seed `Math.random` anew, so that function is replaced
// by one of ours (xoshiro128**, seeded by the kernel); when the machine becomes another generation, as the children of a fork do,
// it is seeded anew, and what was passed to `onReseed` is called. Node's own `crypto` is not reached: docs/pausing-and-forking.md.

const fs = require('fs');
const net = require('net');

const FOLDER = '/run/mainbrella/reseed';
const PATIENCE_MS = 5000;
const callbacks = [];
const state = new Uint32Array(4);

function seed() {
  const bytes = Buffer.alloc(16);
  // Not from `crypto`: its generator is a copy of the source's.
  const file = fs.openSync('/dev/urandom', 'r');
  try {
    fs.readSync(file, bytes, 0, bytes.length, null);
  } finally {
    fs.closeSync(file);
  }
  for (let at = 0; at < 4; at++) state[at] = bytes.readUInt32LE(at * 4);
  if (state.every((word) => word === 0)) state[0] = 1;
}

function rotated(word, by) {
  return ((word << by) | (word >>> (32 - by))) >>> 0;
}

function next() {
  const result = Math.imul(rotated(Math.imul(state[1], 5) >>> 0, 7), 9) >>> 0;
  const shifted = (state[1] << 9) >>> 0;
  state[2] ^= state[0];
  state[3] ^= state[1];
  state[1] ^= state[2];
  state[0] ^= state[3];
  state[2] ^= shifted;
  state[3] = rotated(state[3], 11);
  return result;
}

// 53 bits, as V8 gives 52.
function random() {
  return ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992;
}

/** Has `callback()` called after each reseed. */
function onReseed(callback) {
  callbacks.push(callback);
}

/** Seeds `Math.random` from the kernel's generator. Says whether every callback did its part. */
function reseed() {
  seed();
  let fine = true;
  for (const callback of [...callbacks]) {
    try {
      callback();
    } catch (error) {
      fine = false;
      console.error(error);
    }
  }
  return fine;
}

function register() {
  if (!fs.existsSync(FOLDER)) return;
  const place = `${FOLDER}/${process.pid}`;
  try {
    fs.unlinkSync(place);
  } catch (error) {
    if (error.code !== 'ENOENT') return;
  }
  const server = net.createServer((peer) => {
    peer.setTimeout(PATIENCE_MS, () => peer.destroy());
    peer.on('error', () => {});
    peer.once('data', (said) => peer.end(said.toString() === 'reseed\n' && reseed() ? 'done\n' : 'failed\n'));
  });
  server.on('error', () => {});
  // Neither the wait for the agent keeps the process alive, nor does what is said to it.
  server.listen(place, () => fs.chmodSync(place, 0o700));
  server.unref();
}

seed();
Math.random = random;
register();
module.exports = { onReseed, reseed };

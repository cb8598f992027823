// candidates.cuh - what ranks tell each other to choose an id: a candidate {value, id} and a hash, 96 bits, as one pack of 16 bytes.
//
// Each word is 24 bits of payload under 8 bits of tag, the low bits of the choice's number. A word that carries the tag is that choice's word: each says
// so itself, so nothing has to be ordered, armed or cleared. PRECOND  a slot that is polled for a tag holds no word of another choice with the same tag.
#pragma once
#include "choose.cuh"
#include "peers.cuh"

// A candidate as a pack whose every word carries `tag`, and back.
DEVICE uint4 tagged(uint64_t rank, uint32_t hash, uint32_t tag) {
  const uint32_t lo = uint32_t(rank), hi = uint32_t(rank >> 32), t = tag << 24;
  return make_uint4(t | (lo & 0xffffffu), t | (lo >> 24 | (hi & 0xffffu) << 8), t | (hi >> 16 | (hash & 0xffu) << 16), t | hash >> 8);
}
DEVICE bool carries(uint4 v, uint32_t tag) { return v.x >> 24 == tag && v.y >> 24 == tag && v.z >> 24 == tag && v.w >> 24 == tag; }
DEVICE uint64_t rank_in(uint4 v) {
  const uint32_t lo = (v.x & 0xffffffu) | v.y << 24, hi = (v.y >> 8 & 0xffffu) | v.z << 16;
  return uint64_t(hi) << 32 | lo;
}
DEVICE uint32_t hash_in(uint4 v) { return (v.z >> 16 & 0xffu) | v.w << 8; }

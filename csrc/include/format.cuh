// Numbers that device code shares with Python. Written by `python -m nanoqwen.packing`: change them there.
#pragma once

constexpr int GROUP_SIZE = 128;  // neighbours of a row that share a scale, unless said otherwise
constexpr int ALIGNMENT = 128;   // bytes: each payload of a file starts at a multiple of it
constexpr int PAGE_SIZE = 16;    // tokens of one page of the KV cache

// Layouts: which value lies in which nibble of a word.
constexpr int LAYOUT_SEQUENTIAL = 0;
constexpr int LAYOUT_VALUE_SHUFFLE = 1;
constexpr int LAYOUT_FRAGMENT = 2;

template <int size>  // a variable: device code cannot call a function of the host
constexpr bool is_group_size = size == 32 || size == 64 || size == 128 || size == 256;

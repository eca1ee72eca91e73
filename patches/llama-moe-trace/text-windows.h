// A text as windows of tokens.

#pragma once

#include "llama.h"

#include <algorithm>
#include <string>
#include <vector>

using token_list = std::vector<llama_token>;

// Where `text` stops being UTF-8, or npos. Overlong forms and surrogates are none.
inline size_t not_utf8(const std::string & text) {
    for (size_t at = 0; at < text.size();) {
        const unsigned char lead = text[at];
        const int more = lead < 0x80 ? 0 : lead < 0xc2 ? -1 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : lead < 0xf5 ? 3 : -1;
        unsigned char low  = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
        for (int i = 1; i <= more; i++) {
            const unsigned char next = text[at + i]; // the string's final NUL ends the sequence
            if (next < low || next > high) {
                return at;
            }
            low  = 0x80;
            high = 0xbf;
        }
        if (more < 0) {
            return at;
        }
        at += 1 + more;
    }
    return std::string::npos;
}

// Windows of at most `ctx` tokens, each starting with BOS where the model wants one; a partial last window is kept.
inline std::vector<token_list> cut(const token_list & text, int ctx, llama_token bos) {
    std::vector<token_list> windows;
    const size_t start = bos == LLAMA_TOKEN_NULL ? 0 : 1, step = ctx - start;
    for (size_t at = 0; at < text.size(); at += step) {
        windows.emplace_back(start, bos);
        const auto first = text.begin() + at, last = text.begin() + std::min(at + step, text.size());
        windows.back().insert(windows.back().end(), first, last);
    }
    return windows;
}

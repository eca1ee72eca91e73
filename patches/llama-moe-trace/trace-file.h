// The trace file, record by record. Its format is described in patches/README.md.

#pragma once

#include "topk-tap.h"

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include <unistd.h>

// The header's JSON object, built member by member.
struct json_object {
    std::string members;

    json_object & raw(const std::string & key, const std::string & value) {
        members += (members.empty() ? "\"" : ",\"") + key + "\":" + value;
        return *this;
    }

    json_object & number(const std::string & key, long value) { return raw(key, std::to_string(value)); }

    json_object & string(const std::string & key, const std::string & value) {
        std::string quoted = "\"";
        for (const unsigned char c : value) {
            char escaped[8] = {(char) c};
            if (c == '"' || c == '\\' || c < 0x20) {
                snprintf(escaped, sizeof escaped, "\\u%04x", c);
            }
            quoted += escaped;
        }
        return raw(key, quoted + '"');
    }

    std::string text() const { return "{" + members + "}"; }
};

// Ends the run if no trace can be written to `out`: a file that is there is never replaced.
inline void refuse_unwritable(const std::string & out) {
    const size_t slash = out.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : out.substr(0, slash + 1);
    errno = access(out.c_str(), F_OK) == 0 ? EEXIST : access(folder.c_str(), W_OK) == 0 ? 0 : errno;
    if (errno) {
        throw std::runtime_error(out + ": cannot write (" + strerror(errno) + ")");
    }
}

struct trace_file {
    std::string path;
    FILE *   file;
    bool     begun = false;
    uint32_t total = 0; // tokens

    // Opened when all else is ready, so that no failure before leaves an empty file. Never overwrites.
    explicit trace_file(const std::string & out) : path(out), file(fopen(out.c_str(), "wbx")) { check(file); }

    trace_file(const trace_file &) = delete;

    ~trace_file() {
        fclose(file);
        if (!begun) {
            std::remove(path.c_str());
        }
    }

    void header(const json_object & about) {
        const std::string json = about.text();
        put("MOETRACE", 8);
        put(1); // format version
        put((uint32_t) json.size());
        put(json.data(), json.size());
        begun = true;
    }

    // Flushed as one: whatever ends the run, the file holds whole records up to then.
    void record(uint32_t window, const llama_token * tokens, int count, const tap & listener) {
        put(window);
        put((uint32_t) count);
        put(tokens, count * sizeof *tokens);
        for (const auto & entry : listener.layers) {
            put(entry.second.experts.data(), entry.second.experts.size() * sizeof(int16_t));
        }
        total += count;
        check(fflush(file) == 0);
    }

    void end() {
        put(UINT32_MAX);
        put(total);
        check(fflush(file) == 0);
    }

    void put(uint32_t value) { put(&value, sizeof value); }

    void put(const void * data, size_t size) { check(fwrite(data, 1, size, file) == size); }

    void check(bool written) const {
        if (!written) {
            throw std::runtime_error(path + ": cannot write (" + strerror(errno) + ")");
        }
    }
};

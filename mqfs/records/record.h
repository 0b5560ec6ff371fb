/* The head of a record, in a ring as in a log: docs/reference/format.md. */
#ifndef MQFS_RECORD_H
#define MQFS_RECORD_H
#include <stdint.h>

struct ring_record { /* head of a record; headers, body and zeros up to a multiple of 8 follow */
    uint32_t size, crc;
    uint64_t sequence;
    int64_t time_ns;
    uint32_t stream;
    uint8_t kind, flags;
    uint16_t headers;
};
#endif

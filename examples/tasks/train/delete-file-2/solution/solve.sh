#!/bin/bash
rm store.txt
